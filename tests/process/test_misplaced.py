"""What a fault could not repair is refused where nothing has failed yet; and what may be called, works."""

from pathlib import Path

import pytest
from running import launch


def test_a_body_that_failed_is_not_run_again(tmp_path: Path) -> None:
    """It would be again and again; and a second try that went well would have begun from what the first has left."""
    run = launch(tmp_path / "run", "misplaced.py", "caught", "6", ranks=2, timeout_s=60)
    assert run.code == 1, run.explain()
    # The other rank may be stopped where it stands, before it has caught its own.
    assert "caught out of memory" in run.out, run.explain()
    assert "UsageError: the body of step 3 was left by an exception before its update, and was caught" in run.err


def test_an_exception_behind_the_update_may_be_caught(tmp_path: Path) -> None:
    plan = ("--faults", "kill rank=1 step=4 phase=COMPUTE at=backward")
    run = launch(tmp_path / "run", "misplaced.py", "caught-behind", "6", ranks=2, flags=plan, timeout_s=60)
    assert run.code == 0, run.explain()
    assert run.out.count("caught the log is full") == 2, run.explain()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("in-front", "allreduce was called in front of `with step:`, where a fault that cuts it can't be repaired"),
        ("sampler", "the loader called broadcast: a new process draws the batches"),
        ("thread", "allreduce was called on thread 'logs', and not on that of the loop"),
    ],
)
def test_a_collective_that_could_not_be_repaired_is_refused(tmp_path: Path, mode: str, words: str) -> None:
    """In a healthy job, at the first call."""
    run = launch(tmp_path / "run", "misplaced.py", mode, "6", ranks=2, timeout_s=60)
    assert run.code == 1, run.explain()
    assert words in run.err
    assert "misplaced.py:" in run.err


def test_a_wrapper_that_is_made_in_the_loop_is_refused(tmp_path: Path) -> None:
    """It trained well, and any fault ended the job, or left the ranks in different collectives. Another model's may."""
    run = launch(tmp_path / "run", "misplaced.py", "wraps", "6", ranks=2, timeout_s=60)
    assert run.code == 1, run.explain()
    assert "misplaced.py:" in run.err
    assert "DistributedDataParallel wraps a registered model in the loop" in run.err


def test_a_message_from_any_source_in_a_body(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "misplaced.py", "any-source", "3", ranks=2, timeout_s=60)
    assert run.code == 0, run.explain()


@pytest.mark.parametrize("mode", ["objects", "forward"])
def test_behind_a_cut_body_nothing_breaks(tmp_path: Path, mode: str) -> None:
    """Whoever is cut gives itself what it has."""
    plan = ("--faults", "kill rank=2 step=3 phase=READY at=before")
    run = launch(tmp_path / "run", "misplaced.py", mode, "6", ranks=3, flags=plan, timeout_s=60)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1
    if mode == "objects":
        assert "alone 1: ['sent 1'] [None]" in run.out, run.explain()


@pytest.mark.parametrize("mode", ["messages", "anybody"])
def test_messages_behind_a_cut_body(tmp_path: Path, mode: str) -> None:
    """Who asks from whom a message was is told a rank: without that the error ended the job."""
    plan = ("--faults", "kill rank=2 step=2 phase=COMPUTE at=backward")
    run = launch(tmp_path / "run", "misplaced.py", mode, "6", ranks=3, flags=plan, timeout_s=60)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1
