"""Interrupts at random moments of a loop: none escapes, is lost, comes twice, or cuts what must be whole."""

import json
import sys

import pytest
from running import JOBS, start


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stops", [1_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_interrupts_at_random_moments(stops: int) -> None:
    command = [sys.executable, str(JOBS / "interrupted.py"), str(stops), "7"]
    with start(command) as process:
        out, err = process.communicate(timeout=1700)
    assert process.returncode == 0, err
    counts = json.loads(out)
    assert counts["stops"] == stops
    # Each stop was either caught as an exception or found at the edge of a step; a second exception would be one more.
    assert counts["caught"] + counts["seen_at_the_edge"] == stops
    assert counts["caught"] > stops // 2, "the interrupts were to come in the middle of steps"
    for harm in ("half_done", "in_finalizer", "twice", "unraisable", "half_imported"):
        assert counts[harm] == 0, harm
    for left in ("modes_left", "locks_left", "waiters_left"):
        assert counts[left] == 0, left
    assert counts["foreign"] >= counts["caught"], "the handler that was there before has a right to each signal"
