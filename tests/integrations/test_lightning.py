"""Lightning's Trainer under faults: the bits of the undisturbed run."""

from pathlib import Path

import pytest
from trained import EVERYWHERE, assert_recovered, train

IN_WINDOWS = (
    "kill rank=1 step=4 phase=COMPUTE at=backward; kill rank=0 step=8 phase=UPDATING; "
    "hcce rank=1 step=14 incarnation=1; kill rank=1 step=18 phase=APPLIED at=end incarnation=1; "
    "kill rank=0 step=24 incarnation=1"
)
"""Windows of three batches, and of one at each epoch's end."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("accumulate", "plan"), [(1, EVERYWHERE), (3, IN_WINDOWS)])
def test_trainer(tmp_path: Path, accumulate: int, plan: str) -> None:
    arguments = ("with_lightning.py", "--accumulate", str(accumulate))
    quiet = train(tmp_path / "quiet", *arguments)
    run = train(tmp_path / "run", *arguments, plan=plan)
    assert_recovered(run, quiet, faults=5, words=" ends: steps ")


@pytest.mark.timeout(1200)
def test_all_ranks_lost(tmp_path: Path) -> None:
    """They start again in the middle of an epoch."""
    arguments = ("with_lightning.py", "--save", "4")
    quiet = train(tmp_path / "quiet", *arguments)
    run = train(tmp_path / "run", *arguments, plan="kill rank=0 step=17; kill rank=1 step=17")
    assert len(run.of("injected")) == 2
    assert run.of("other_data") == []
    assert run.digests() == quiet.digests(), run.explain()
