"""What a fault could not repair is refused where nothing has failed yet; and what may be called, works."""

from pathlib import Path

from running import launch

def test_a_body_that_failed_is_not_run_again(tmp_path: Path) -> None:
    """It would be again and again; and a second try that went well would have begun from what the first has left."""
    run = launch(tmp_path / "run", "misplaced.py", "caught", "6", ranks=2, timeout_s=60)
    assert run.code == 1, run.explain()
    assert run.out.count("caught out of memory") == 2, run.explain()
    assert "UsageError: the body of step 3 was left by an exception before its update, and was caught" in run.err


def test_an_exception_behind_the_update_may_be_caught(tmp_path: Path) -> None:
    plan = ("--faults", "kill rank=1 step=4 phase=COMPUTE at=backward")
    run = launch(tmp_path / "run", "misplaced.py", "caught-behind", "6", ranks=2, flags=plan, timeout_s=60)
    assert run.code == 0, run.explain()
    assert run.out.count("caught the log is full") == 2, run.explain()
