"""What flows from step to step: in a ``Carried`` it survives a kill anywhere; in a local variable it does not."""

from pathlib import Path

import pytest
from running import launch
from shared import Undisturbed
from test_kill_matrix import PLACES, kills

from resilient_train.session.explain import RAN_AGAIN

ALONE = [pytest.param(each, marks=pytest.mark.long) for each in ("end", "ahead", "hidden")]


@pytest.mark.parametrize("where", ["both", *ALONE])
def test_a_carried_value_survives_a_kill_in_each_phase(tmp_path: Path, undisturbed_of: Undisturbed, where: str) -> None:
    plan, steps = kills(2, PLACES, 1)
    arguments = ("carried.py", "--where", where, "--steps", str(steps))
    reference = undisturbed_of(*arguments, ranks=2)
    run = launch(tmp_path / "run", *arguments, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == len(PLACES) == run.recoveries(), run.explain()
    assert run.digests() == reference.digests(), run.explain()


def test_a_body_may_be_cut_between_take_and_put(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    arguments = ("carried.py", "--where", "both", "--steps", "6")
    reference = undisturbed_of(*arguments, ranks=2)
    run = launch(tmp_path / "run", *arguments, "--cut-at", "3", ranks=2)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1, run.explain()
    assert run.digests() == reference.digests(), run.explain()


@pytest.mark.parametrize("where", ["both", *ALONE])
def test_the_same_loop_with_local_variables_is_wrong(tmp_path: Path, undisturbed_of: Undisturbed, where: str) -> None:
    """The control: what it is good for. Undisturbed, both train alike. In six steps nothing is found of it yet."""
    arguments = ("carried.py", "--where", where, "--steps", "6")
    right = undisturbed_of(*arguments, ranks=2)
    plain = launch(tmp_path / "plain", *arguments, "--plain", ranks=2)
    run = launch(tmp_path / "run", *arguments, "--plain", ranks=2, flags=("--faults", "kill rank=1 step=3"))
    assert plain.code == run.code == 0, run.explain()
    of_all = [{digest for digest, _ in each.digests().values()} for each in (right, plain, run)]
    assert of_all[1] != of_all[2]
    assert of_all[0] == of_all[1]


@pytest.mark.parametrize("where", ["end", "ahead", "hidden"])
def test_a_few_steps_later_it_is_refused(tmp_path: Path, where: str) -> None:
    """Also behind a fault. One that cuts a body between its model and ``hidden.detach()`` may be loud before: below."""
    run = launch(
        tmp_path / "run",
        *("carried.py", "--where", where, "--steps", "12", "--plain"),
        ranks=2,
        flags=("--faults", "kill rank=1 step=3"),
    )
    assert run.code == 1, run.explain()
    name = "hidden" if where == "hidden" else "X and Y"
    words = "UsageError: gradients are computed from what the step before has written, and is not registered: "
    assert f"{words}{name}. " in run.err or (where == "hidden" and RAN_AGAIN.format(step=3) in run.err), run.explain()


def test_an_error_in_a_body_that_ran_again_says_so(tmp_path: Path) -> None:
    """torch's own error, of a graph that the cut body has left, says nothing of a fault; the next start has no cut."""
    arguments = ("carried.py", "--where", "hidden", "--steps", "6", "--plain", "--cut-at", "3")
    run = launch(tmp_path / "run", *arguments, ranks=2)
    assert run.code == 1, run.explain()
    assert "modified by an inplace operation" in run.err, run.explain()
    assert run.err.count(RAN_AGAIN.format(step=3)) == 1, run.explain()
