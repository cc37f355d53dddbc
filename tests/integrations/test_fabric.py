"""The loop with Lightning Fabric of the how-to under faults: the bits of the undisturbed run."""

from pathlib import Path

import pytest
from trained import EVERYWHERE, assert_mended, assert_repaired, assert_resumed, assert_started_again

JOB = "with_fabric.py"
OF_THREE = (
    "kill rank=1 step=4 phase=COMPUTE at=backward; kill rank=0 step=8 phase=UPDATING; "
    "hcce rank=1 step=12 incarnation=1; kill rank=1 step=20 phase=APPLIED at=end incarnation=1; "
    "kill rank=0 step=26 phase=READY at=barrier incarnation=1"
)
"""Of 30 steps, every third of which updates."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("accumulate", "plan"), [(1, EVERYWHERE), (3, OF_THREE)])
def test_loop(tmp_path: Path, accumulate: int, plan: str) -> None:
    assert_repaired(tmp_path, JOB, "--accumulate", str(accumulate), plan=plan)


@pytest.mark.timeout(1200)
def test_devices_that_compute_wrongly(tmp_path: Path) -> None:
    assert_mended(tmp_path, JOB)


@pytest.mark.timeout(1200)
def test_all_ranks_lost(tmp_path: Path) -> None:
    assert_started_again(tmp_path, JOB)


@pytest.mark.timeout(1200)
def test_a_job_that_ended_is_started_again(tmp_path: Path) -> None:
    assert_resumed(tmp_path, JOB)
