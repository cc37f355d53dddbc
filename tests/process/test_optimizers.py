"""Every kind of optimizer ends a kill with the bits of an undisturbed run, or is refused before it ends otherwise."""

from pathlib import Path

import pytest
from running import launch
from shared import Undisturbed

STEPS = "12"
KILLS = (
    "kill rank=1 step=3 phase=COMPUTE at=backward; kill rank=0 step=5 phase=UPDATING; kill rank=1 step=7 phase=READY "
    "at=barrier incarnation=1; kill rank=0 step=9 phase=BETWEEN incarnation=1"
)
IN_CLOSURE = KILLS.replace("step=5 phase=UPDATING", "step=5 phase=COMPUTE at=forward")
"""With undo the update is over when its phase begins."""


ALONE = ("sgd", "momentum", "adafactor", "muon", "frozen", "closure")
"""Each by itself, to tell which one is to blame."""


@pytest.mark.parametrize(
    "kind", ["several", "lbfgs", "sharpness", *(pytest.param(each, marks=pytest.mark.long) for each in ALONE)]
)
def test_an_optimizer_comes_back_bit_for_bit(tmp_path: Path, undisturbed_of: Undisturbed, kind: str) -> None:
    reference = undisturbed_of("optimizers.py", kind, STEPS, ranks=2)
    plan = IN_CLOSURE if kind in ("lbfgs", "closure") else KILLS
    run = launch(tmp_path / "run", "optimizers.py", kind, STEPS, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.recoveries() == len(run.of("injected")) == 4, run.explain()
    assert ("Sharpness steps the registered SGD, and is not registered itself" in run.err) == (kind == "sharpness")
    ((expected, _), *_) = reference.digests().values()
    assert [digest for digest, _ in run.digests().values()] == [expected] * 2, run.explain()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("averaging", "Averaging.step() called allreduce"),
        ("closure-without-undo", "pass Session(undo=True), so that such a step can be redone"),
    ],
)
def test_a_collective_in_an_update_is_told_with_the_right_advice(tmp_path: Path, kind: str, words: str) -> None:
    run = launch(tmp_path / "run", "optimizers.py", kind, STEPS, ranks=2)
    assert run.code == 1, run.explain()
    assert words in run.err
