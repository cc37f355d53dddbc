"""The loop with accelerate of the how-to under faults: the bits of the undisturbed run."""

from pathlib import Path

import pytest
from trained import EVERYWHERE, assert_recovered, train

IN_WINDOWS = (
    "kill rank=1 step=2 phase=COMPUTE at=backward; kill rank=0 step=5 phase=UPDATING; "
    "hcce rank=1 step=7 incarnation=1; kill rank=1 step=8 phase=APPLIED at=end incarnation=1; "
    "kill rank=0 step=10 phase=READY at=barrier incarnation=1"
)
"""Of 12 windows, four to an epoch."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("accumulate", "plan"), [(1, EVERYWHERE), (3, IN_WINDOWS)])
def test_loop(tmp_path: Path, accumulate: int, plan: str) -> None:
    arguments = ("with_accelerate.py", "--accumulate", str(accumulate))
    quiet = train(tmp_path / "quiet", *arguments)
    run = train(tmp_path / "run", *arguments, plan=plan)
    assert_recovered(run, quiet, faults=5, words=" ends: last loss ")


@pytest.mark.timeout(1200)
def test_all_ranks_lost(tmp_path: Path) -> None:
    arguments = ("with_accelerate.py", "--save", "4")
    quiet = train(tmp_path / "quiet", *arguments)
    run = train(tmp_path / "run", *arguments, plan="kill rank=0 step=17; kill rank=1 step=17")
    assert len(run.of("injected")) == 2
    assert run.of("other_data") == []
    assert run.digests() == quiet.digests(), run.explain()


@pytest.mark.timeout(1200)
def test_an_order_that_is_in_no_epochs_number_is_told(tmp_path: Path) -> None:
    """accelerate's own sampler carries the state of a generator on from epoch to epoch; a new process has the first."""
    run = train(tmp_path / "run", "with_accelerate.py", "--unseeded", plan="kill rank=1 step=13")
    (told,) = run.of("other_data")
    assert (told["rank"], told["step"]) == (1, 13)
