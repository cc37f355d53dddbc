"""A backbone that is frozen behind ``DDP(...)``: what the wrapper averages is what it was made with."""

from pathlib import Path

import pytest
from running import launch
from shared import Undisturbed

STEPS = "16"
KILLS = (
    "kill rank=1 step=0 phase=COMPUTE at=backward; "
    "kill rank=1 step=3 phase=COMPUTE at=backward incarnation=1; "
    "kill rank=0 step=5 phase=UPDATING; "
    "kill rank=0 step=13 phase=COMPUTE at=backward incarnation=1"
)
CUTS = "hcce rank=1 step=0 phase=COMPUTE at=backward; hcce rank=0 step=12 phase=COMPUTE at=backward"


@pytest.mark.parametrize(
    ("ways", "plan"),
    [
        ("between+static", CUTS),
        ("between+unused+hook+thaws", KILLS),
        *(
            pytest.param(*rare, marks=pytest.mark.long)
            for rare in (
                ("between+static", KILLS),
                ("between+static+hook", KILLS),
                ("between+unused+hook", CUTS),
                ("unused+hook+thaws", CUTS),
            )
        ),
    ],
)
def test_the_bits_are_those_of_an_undisturbed_run(
    tmp_path: Path, undisturbed_of: Undisturbed, ways: str, plan: str
) -> None:
    """With three ranks, so that the layout of the buckets decides about them."""
    reference = undisturbed_of("freezing.py", ways, STEPS, ranks=3)
    run = launch(tmp_path / "run", "freezing.py", ways, STEPS, ranks=3, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == run.recoveries() == plan.count("rank="), run.explain()
    assert run.digests() == reference.digests(), run.explain()


def test_beside_sparse_gradients_it_is_refused(tmp_path: Path) -> None:
    """There torch does not tell what the wrapper averages."""
    run = launch(tmp_path / "run", "freezing.py", "between+static+words", STEPS, ranks=2)
    assert run.code == 2, run.explain()
    assert "behind DistributedDataParallel(...), and which gradients it averages can't be found out" in run.err
