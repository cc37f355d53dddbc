"""State that a script changes in front of its update: a fault puts it back, or the job ends loudly.

Until now it was changed again when the step was: other bits, the same on all ranks, and exit code 0.
"""

from pathlib import Path
from typing import Any

import pytest
from identity import assert_identical
from running import Reference, launch
from saved_jobs import only_storage_leaves_snapshots_out
from shared import Undisturbed
from test_kill_matrix import PLACES, kills

TOGETHER = ("momentum+counter+array", "silent+average", "replaced+rate")
"""One way to change parameters each, and what else a loop can change beside them."""
BEHIND = "assigned+behind+decay"
"""Where a snapshot may be left out, because it is being taken when that is changed."""
ALONE = ("momentum", "assigned", "silent", "replaced", "counter", "array", "average", "behind", "decay", "rate")
"""Each by itself, to tell which one is to blame."""
FAULTS = (
    "kill rank=1 step=4 phase=COMPUTE at=backward; kill rank=0 step=6 phase=READY at=before; "
    "hcce rank=1 step=8 phase=READY at=before incarnation=1; kill rank=1 step=10 phase=APPLIED at=start incarnation=1"
)


def long(what: tuple[str, ...]) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.long) for each in what]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", TOGETHER)
def test_what_is_written_before_the_update_is_put_back(tmp_path: Path, undisturbed_of: Undisturbed, what: str) -> None:
    """By a redo, from a replica; and from a snapshot, which is of what its step found."""
    plain = undisturbed_of("written_early.py", what, ranks=2)
    arguments = (what, "--save", "3", "--all-die", "13")
    run = launch(tmp_path / "run", "written_early.py", *arguments, ranks=2, flags=("--faults", FAULTS))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == 4, run.explain()
    assert run.recoveries() >= 4, run.explain()
    assert not run.of("state_lost"), run.explain()
    assert len(run.of("restart_all")) == 1, run.explain()
    assert {event["detail"]["commits"] for event in run.of("restored")} & {3, 6, 9, 12}, run.explain()
    assert only_storage_leaves_snapshots_out(run), run.explain()
    assert run.ends() == plain.ends(), run.explain()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", [BEHIND, *long(ALONE)])
def test_a_redo_puts_it_back(tmp_path: Path, undisturbed_of: Undisturbed, what: str) -> None:
    plain = undisturbed_of("written_early.py", what, ranks=2)
    run = launch(tmp_path / "run", "written_early.py", what, ranks=2, flags=("--faults", FAULTS))
    assert run.code == 0, run.explain()
    assert run.recoveries() >= 4, run.explain()
    assert run.ends() == plain.ends(), run.explain()


@pytest.mark.timeout(240)
def test_what_a_loader_moves_on_within_a_window(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """A redo does not draw again."""
    plain = undisturbed_of("written_early.py", "accumulate", ranks=2)
    plan = "hcce rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=9 phase=READY at=before"
    run = launch(tmp_path / "run", "written_early.py", "accumulate", ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 2, run.explain()
    assert run.ends() == plain.ends(), run.explain()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["groups", *long(("momentum", "silent", "replaced", "counter", "average", "rate"))])
def test_a_snapshot_is_of_what_the_step_found(tmp_path: Path, undisturbed_of: Undisturbed, what: str) -> None:
    plain = undisturbed_of("written_early.py", what, ranks=2)
    run = launch(tmp_path / "run", "written_early.py", what, "--save", "3", "--all-die", "11", ranks=2)
    assert run.code == 0, run.explain()
    assert {event["detail"]["commits"] for event in run.of("restored")} & {3, 6, 9}, run.explain()
    assert only_storage_leaves_snapshots_out(run), run.explain()
    assert run.ends() == plain.ends(), run.explain()


RARE = "kill rank=1 step=9 phase=READY at=before"
"""In the one step that is another one: nobody has a copy of what it writes."""


@pytest.mark.timeout(240)
def test_what_is_written_for_the_first_time_is_taken_from_a_snapshot(
    tmp_path: Path, undisturbed_of: Undisturbed
) -> None:
    plain = undisturbed_of("written_early.py", "rarely", ranks=2)
    run = launch(tmp_path / "run", "written_early.py", "rarely", "--save", "3", ranks=2, flags=("--faults", RARE))
    assert run.code == 0, run.explain()
    assert run.of("state_lost"), run.explain()
    assert len(run.of("restart_all")) == 1, run.explain()
    assert run.ends() == plain.ends(), run.explain()


def test_what_is_written_for_the_first_time_ends_a_job_without_snapshots(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "written_early.py", "rarely", ranks=2, flags=("--faults", RARE))
    assert run.code not in (0, 2), run.explain()
    assert "was written before the update of step 9" in run.err, run.explain()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("variant", ["early+two+undo", *long(("early", "early+two", "early+undo", "early+scaler"))])
def test_kill_at_every_phase(tmp_path: Path, undisturbed: Reference, variant: str) -> None:
    plan, steps = kills(2, PLACES, 0)
    reference = undisturbed(ranks=2, steps=steps, variant=variant)
    arguments = ("--steps", str(steps), "--variant", variant)
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=2, flags=("--faults", plan))
    hits = len(run.of("injected"))
    assert hits == len(PLACES) - ("undo" in variant), "with undo a body has no end of its own behind its update"
    assert_identical(run, reference, ranks=2, recoveries=hits, once="undo" not in variant)


@pytest.mark.timeout(240)
def test_kill_before_a_replacement_has_seen_a_whole_step(tmp_path: Path, undisturbed: Reference) -> None:
    """It knows from its replica what is written early, and is the only one that is left when that dies."""
    plan = "kill rank=1 step=4 phase=COMPUTE at=backward; kill rank=0 step=4 phase=READY at=before generation=1"
    reference = undisturbed(ranks=2, steps=8, variant="early")
    run = launch(tmp_path / "run", "train.py", "--steps", "8", "--variant", "early", ranks=2, flags=("--faults", plan))
    assert_identical(run, reference, ranks=2, recoveries=2)


@pytest.mark.parametrize("variant", ["early+two+undo", "gan", "two+before"])
def test_what_optimizers_write_themselves_is_no_bodys_doing(tmp_path: Path, variant: str) -> None:
    """Also where one of them has written before another one's gradients are there."""
    plan = "kill rank=1 step=4 phase=COMPUTE at=backward"
    run = launch(tmp_path / "run", "train.py", "--steps", "8", "--variant", variant, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert not [event for event in run.of("written_early") if event["detail"].get("lost")], run.explain()


def test_a_step_that_is_computed_twice_keeps_all(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """So that to look whether a device computes rightly takes nothing away from a job."""
    plain = undisturbed_of("written_early.py", "rarely", ranks=2)
    run = launch(tmp_path / "run", "written_early.py", "rarely", ranks=2, RESILIENT_VERIFY_EVERY="10")
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1, run.explain()
    assert not run.of("state_lost"), run.explain()
    assert run.ends() == plain.ends(), run.explain()


@pytest.mark.parametrize(("what", "step"), [("sampler", 0), ("sampler+passes", 6)])
def test_a_samplers_place_that_is_said_to_be_shared_is_refused(tmp_path: Path, what: str, step: int) -> None:
    run = launch(tmp_path / "run", "written_early.py", what, ranks=2)
    assert run.code == 1, run.explain()
    assert f"state['places'] was changed while the batch of step {step} was loaded" in run.err
    assert "Session(rank_state={'places': ...})" in run.err
