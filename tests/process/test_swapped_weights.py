"""Weights that a script changes for a while, and puts back, while a snapshot could be copied.

At the top of the loop that was copied, saved and gone on from: other bits, exit code 0.
"""

from pathlib import Path

import pytest
from running import Run, launch
from saved_jobs import only_storage_leaves_snapshots_out
from shared import Undisturbed


def parameters(run: Run) -> dict[int, str]:
    return {rank: digest for rank, (digest, _) in run.digests().items()}


@pytest.mark.long
def test_other_weights_between_the_head_of_the_loop_and_its_body(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    plain = undisturbed_of("swapped.py", "body", ranks=2)  # where it evaluates, it trains the same
    run = launch(tmp_path / "run", "swapped.py", "top", "--all-die", ranks=2)
    assert run.code == 0, run.explain()
    assert len(run.of("restart_all")) == 1
    assert {event["detail"]["commits"] for event in run.of("restored")} <= {5, 10}
    assert parameters(run) == parameters(plain), "Python's generator is not seeded"
    assert only_storage_leaves_snapshots_out(run), run.explain()


def test_other_weights_in_a_body_spoil_the_first_snapshot(undisturbed_of: Undisturbed) -> None:
    """From then on there is a copy of what the window began with, and the snapshot is of that."""
    run = undisturbed_of("swapped.py", "body", ranks=2)
    assert {event["detail"]["commits"] for event in run.of("saved")} <= {10, 15}, run.explain()
    assert run.of("saved"), run.explain()
    reasons = {event["detail"]["reason"].partition(": ")[2] for event in run.of("save_skipped")}
    spoilt = "'model.0.module.2.weight' was written before the update of its step, while it was copied"
    assert spoilt in reasons, run.explain()
    assert run.err.count("was written before the update of its step, while it was copied") == 1, "told once"
