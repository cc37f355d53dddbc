"""A user's connections survive recoveries: only those of gloo's are shut."""

from pathlib import Path

import pytest
from running import launch


@pytest.mark.timeout(200)
def test_connections_of_the_users_live_on(tmp_path: Path) -> None:
    faults = (
        "kill rank=1 step=2 phase=COMPUTE at=backward; kill rank=1 step=5 phase=UPDATING incarnation=1; "
        "hcce rank=2 step=7; kill rank=1 step=9 phase=COMPUTE at=forward incarnation=2"
    )
    arguments = ("own_sockets.py", "--fixed", "0", "2", "3")
    run = launch(tmp_path / "run", *arguments, ranks=4, flags=("--faults", faults), timeout_s=180)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 4, run.explain()
    assert len(run.of("injected")) == 4, run.explain()
    counts = [int((run.run_dir / f"checked_{rank}").read_text()) for rank in range(4)]
    assert all(count >= 200 for count in counts), counts
