"""What a script itself keeps in torch's store, it finds in a process that takes a rank's place as well."""

from pathlib import Path

import pytest
from running import launch

PLAN = ("--faults", "kill rank=1 step=3 phase=COMPUTE")


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--standby", "0"), marks=pytest.mark.long)], ids=["forked", "cold"]
)
def test_a_script_with_words_of_its_own(tmp_path: Path, flags: tuple[str, ...]) -> None:
    run = launch(tmp_path / "run", "stored.py", ranks=2, flags=(*flags, *PLAN))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1
    told = sorted(line for line in run.out.splitlines() if line.startswith("rank "))
    assert [line.rpartition(" ")[0] for line in told] == ["rank 0: [True]", "rank 1: [False, True]"], run.explain()
