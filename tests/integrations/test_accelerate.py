"""The loop with accelerate of the how-to under faults: the bits of the undisturbed run."""

from pathlib import Path

import pytest
from trained import EVERYWHERE, IN_WINDOWS, assert_mended, assert_repaired, assert_resumed, assert_started_again, train

JOB = "with_accelerate.py"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("accumulate", "plan"), [(1, EVERYWHERE), (3, IN_WINDOWS)])
def test_loop(tmp_path: Path, accumulate: int, plan: str) -> None:
    assert_repaired(tmp_path, JOB, "--accumulate", str(accumulate), plan=plan)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_devices_that_compute_wrongly(tmp_path: Path, accumulate: int) -> None:
    assert_mended(tmp_path, JOB, "--accumulate", str(accumulate))


@pytest.mark.timeout(1200)
def test_all_ranks_lost(tmp_path: Path) -> None:
    assert_started_again(tmp_path, JOB)


@pytest.mark.timeout(1200)
def test_a_job_that_ended_is_started_again(tmp_path: Path) -> None:
    assert_resumed(tmp_path, JOB)


@pytest.mark.timeout(1200)
def test_an_order_that_is_in_no_epochs_number_is_told(tmp_path: Path) -> None:
    """accelerate's own sampler carries the state of a generator on from epoch to epoch; a new process has the first."""
    run = train(tmp_path / "run", JOB, "--unseeded", plan="kill rank=1 step=13")
    (told,) = run.of("other_data")
    assert (told["rank"], told["step"]) == (1, 13)
