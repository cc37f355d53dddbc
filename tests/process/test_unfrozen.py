"""A loop that changes what it trains: a group more in the optimizer is handed on, a layer more is refused."""

from pathlib import Path

import pytest
from running import Run, launch
from shared import Undisturbed

STEPS = "14"
KILLS = (
    "kill rank=1 step=4 phase=UPDATING; "
    "kill rank=0 step=6 phase=COMPUTE at=backward; "
    "kill rank=1 step=6 phase=UPDATING incarnation=1; "
    "kill rank=0 step=6 phase=APPLIED at=end incarnation=1; "
    "kill rank=1 step=10 phase=COMPUTE at=backward incarnation=2"
)
"""Before the step of the change; in it, so that it is made again; when only some have made it; after it."""


def same_parameters(run: Run, reference: Run) -> bool:
    (expected, *_), *_ = reference.digests().values()
    return {digest for digest, _ in run.digests().values()} == {expected}


@pytest.mark.parametrize("where", [pytest.param("head", marks=pytest.mark.long), "body", "tail"])
def test_a_group_that_is_added_in_training_survives_every_kill(
    tmp_path: Path, undisturbed_of: Undisturbed, where: str
) -> None:
    reference = undisturbed_of("unfrozen.py", where, STEPS, ranks=3)
    run = launch(tmp_path / "run", "unfrozen.py", where, STEPS, ranks=3, flags=("--faults", KILLS))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == 5, run.explain()
    assert same_parameters(run, reference), run.explain()


def test_with_undo_too(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    arguments = ("unfrozen.py", "body", STEPS, "--undo")
    plan = "kill rank=1 step=6 phase=COMPUTE at=end; kill rank=0 step=6 phase=COMPUTE at=backward generation=1"
    reference = undisturbed_of("unfrozen.py", "body", STEPS, ranks=2)
    run = launch(tmp_path / "run", *arguments, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert same_parameters(run, reference), run.explain()


def test_all_start_again_with_the_groups_of_the_checkpoint(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """From behind the step that adds them: it will not run again."""
    plan = "kill rank=0 step=10 phase=COMPUTE; kill rank=1 phase=STOP generation=1"
    reference = undisturbed_of("unfrozen.py", "body", STEPS, ranks=2)
    arguments = ("unfrozen.py", "body", STEPS, "--save", "4")
    run = launch(tmp_path / "run", *arguments, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert {each["detail"]["commits"] for each in run.of("restored")} == {8}, run.explain()
    assert same_parameters(run, reference), run.explain()


def test_a_model_that_grew_is_final_and_told_once(tmp_path: Path) -> None:
    """No second recovery that can't succeed either, and no checkpoint that nothing could be started from."""
    plan = "kill rank=1 step=10 phase=COMPUTE"
    arguments = ("unfrozen.py", "grown", STEPS, "--save", "3")
    run = launch(tmp_path / "run", *arguments, ranks=2, flags=("--faults", plan))
    assert run.code == 2, run.explain()
    assert len(run.of("fault")) == 1, run.explain()
    told = [line for line in run.err.splitlines() if "resilient-run: the job ends" in line]
    assert len(told) == 1
    assert "rank 1 can't be replaced from rank 0, whose state does not fit: parameter 'module.3.weight'" in told[0]
    assert run.err.count("saves nothing any more: the model has changed since Session(): '0.module.3.weight'") >= 1
    assert [each["detail"]["commits"] for each in run.of("saved")] == [3, 6], "from before it grew"
    assert "the job goes on from update 6" in run.err
    again = launch(tmp_path / "run", *arguments, ranks=2, flags=("--faults", ""))
    assert again.code == 0, again.explain()
    assert {each["detail"]["commits"] for each in again.of("restored")} == {6}, again.explain()


def test_a_model_that_grew_is_told_while_all_is_well(tmp_path: Path) -> None:
    """At the next comparison of replicas; and not one that only trains more of what it has."""
    run = launch(tmp_path / "run", "unfrozen.py", "grown", STEPS, ranks=2)
    assert run.code == 0, run.explain()
    assert {(each["rank"], each["step"]) for each in run.of("outgrown")} == {(0, 8), (1, 8)}, run.explain()
    told = "the model has changed since Session(): '0.module.3.weight' is (3, 3) of torch.float32, and was not there"
    assert run.err.count(told) == 1, run.explain()
    run = launch(tmp_path / "same", "unfrozen.py", "tail", STEPS, ranks=2)
    assert run.code == 0, run.explain()
    assert run.of("outgrown") == [], run.explain()
