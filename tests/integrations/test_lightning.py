"""Lightning's Trainer under faults: the bits of the undisturbed run."""

from pathlib import Path

import pytest
from trained import EVERYWHERE, assert_repaired, assert_started_again

JOB = "with_lightning.py"
IN_CALLS = (
    "kill rank=1 step=4 phase=COMPUTE at=backward; kill rank=0 step=8 phase=UPDATING; "
    "hcce rank=1 step=14 incarnation=1; kill rank=1 step=18 phase=APPLIED at=end incarnation=1; "
    "kill rank=0 step=24 incarnation=1"
)
"""A step is a batch. Windows of three batches, and of one at each epoch's end."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("accumulate", "plan"), [(1, EVERYWHERE), (3, IN_CALLS)])
def test_trainer(tmp_path: Path, accumulate: int, plan: str) -> None:
    assert_repaired(tmp_path, JOB, "--accumulate", str(accumulate), plan=plan)


@pytest.mark.timeout(1200)
def test_all_ranks_lost(tmp_path: Path) -> None:
    assert_started_again(tmp_path, JOB)
