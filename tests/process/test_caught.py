"""Bodies that catch the error of a fault: nothing is left out for that."""

from pathlib import Path

import pytest
from running import launch
from shared import Undisturbed

STEPS = "10"
PLANS = {
    # Behind the last one nothing in the loop communicates, and the code behind it does.
    "within": "hcce rank=0 step=3; kill rank=1 step=6 at=backward; hcce rank=0 step=9 phase=APPLIED at=end",
    "last": "hcce rank=1 step=9 at=backward",
}


@pytest.mark.parametrize("loop", ["steps", "calls"])
@pytest.mark.parametrize("where", PLANS)
def test_a_body_that_goes_on_runs_again(tmp_path: Path, undisturbed_of: Undisturbed, loop: str, where: str) -> None:
    reference = undisturbed_of("caught.py", loop, STEPS, ranks=2)
    run = launch(tmp_path / "run", "caught.py", loop, STEPS, ranks=2, flags=("--faults", PLANS[where]))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == run.recoveries() == len(PLANS[where].split(";")), run.explain()
    assert run.digests() == reference.digests(), run.explain()
