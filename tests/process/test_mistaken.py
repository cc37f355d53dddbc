"""Mistakes in a loop that ended with exit code 0 and something wrong, or with nothing that a fault could go back to."""

from pathlib import Path

import pytest
from running import launch


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("wrong-optimizer", "AdamW is about to update 'module.0.weight' of the registered model"),
        ("by-hand", "step 0 has changed parameter 'module."),
    ],
)
def test_an_update_that_the_session_does_not_see_is_refused(tmp_path: Path, mode: str, words: str) -> None:
    run = launch(tmp_path / "run", "mistaken.py", mode, "25", ranks=2)
    assert run.code == 1, run.explain()
    assert f"UsageError: {words}" in run.err


def test_a_loop_that_never_updates_is_told_once(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "mistaken.py", "never", "250", ranks=2)
    assert run.code == 0, run.explain()
    (told,) = run.of("no_update")
    assert (told["rank"], told["step"], told["detail"]) == (0, 99, {"steps": 100, "begun": 0})
    assert run.err.count("no registered optimizer has stepped in 100 steps, since step 0") == 1


def test_a_parameter_that_nobody_trains_is_told_once(tmp_path: Path) -> None:
    """Also where rank 0 is replaced."""
    plan = ("--faults", "kill rank=0 step=2")
    run = launch(tmp_path / "run", "mistaken.py", "forgotten", "5", ranks=2, flags=plan)
    assert run.code == 0, run.explain()
    assert run.err.count("in no registered optimizer: 1 ('module.0.weight'); ") == 1
