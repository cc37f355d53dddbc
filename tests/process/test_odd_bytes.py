"""Names, arguments and variables may be any bytes on Linux: the ranks get them as they are, and may keep them."""

from pathlib import Path

import pytest
from running import JOBS, launch
from shared import Undisturbed


@pytest.mark.parametrize(
    ("depth", "more"),
    [
        ("forked", {}),
        ("built", {}),
        pytest.param("forked", {"NOT_OF_THE_TEST_SERVER": "1"}, marks=pytest.mark.long, id="of a new launcher"),
    ],
)
def test_what_is_not_utf_8_reaches_a_replacement(
    tmp_path: Path, undisturbed_of: Undisturbed, depth: str, more: dict[str, str]
) -> None:
    odd = "caf\udce9"
    reference = undisturbed_of("odd_bytes.py", odd, ranks=2, TORCHELASTIC_ODD=odd)
    run = launch(
        tmp_path / "run",
        "odd_bytes.py",
        odd,
        ranks=2,
        flags=("--faults", "kill rank=1 step=3"),
        TORCHELASTIC_ODD=odd,
        RESILIENT_STANDBY_DEPTH=depth,
        **more,
    )
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1, run.explain()
    assert run.digests() == reference.digests(), run.explain()
    (began,) = run.of("run_start")
    assert began["detail"]["argv"][-1] == r"caf\udce9", "for people to read"


def test_a_script_whose_path_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "caf\udce9.py"
    script.write_bytes((JOBS / "odd_bytes.py").read_bytes())
    run = launch(tmp_path / "run", str(script), "caf\udce9", ranks=1, TORCHELASTIC_ODD="caf\udce9")
    assert run.code == 2, run.explain()
    assert r"caf\udce9.py' is not UTF-8: PyTorch can't pass on" in run.err, run.explain()
    assert not (tmp_path / "run").exists()
