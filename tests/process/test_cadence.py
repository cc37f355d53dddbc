"""How often all ranks save when rank 0 decides: each checkpoint is whole, also after rank 0 has been replaced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from running import Run, launch

from resilient_train.state.checkpoint.verify import verify


def go(run_dir: Path, steps: int, mode: dict[str, Any], *flags: str, ranks: int = 2, wait: Sequence[str] = ()) -> Run:
    """``wait``: behind this step for that update's checkpoint, or a later one's, however slow storage is."""
    arguments = ("--steps", str(steps), "--save-mode", json.dumps(mode), *(("--saved-by", *wait) if wait else ()))
    run = launch(run_dir, "train.py", *arguments, ranks=ranks, flags=flags)
    assert run.code == 0, run.explain()
    assert not run.of("save_off") + run.of("save_failed"), run.explain()
    for path in (run_dir / "checkpoints").iterdir():
        assert verify(path).ok
    return run


def commits_of(run: Run, kind: str) -> list[int]:
    return [event["detail"]["commits"] for event in run.of(kind)]


def test_auto_goes_on_after_rank_0_was_replaced(tmp_path: Path) -> None:
    plan = "kill rank=0 step=26 phase=COMPUTE"
    run = go(tmp_path / "run", 60, {"mode": "auto"}, "--faults", plan, wait=("25", "20"))
    assert run.recoveries() == 1
    saved = commits_of(run, "saved")
    # Rank 0 begins with a save after 20 updates to measure one; the one in its place likewise, behind its first.
    assert saved[0] == 20
    assert any(commits > 26 for commits in saved), run.explain()
    costs = run.of("save_cost")
    assert {event["rank"] for event in costs} == {0}
    assert all(event["detail"]["stall_s"] >= event["detail"]["waited_s"] > 0 for event in costs)
    assert not run.of("save_skipped"), run.explain()


@pytest.mark.parametrize(("ranks", "steps"), [pytest.param(1, 120, marks=pytest.mark.long), (3, 50)])
def test_by_seconds(tmp_path: Path, ranks: int, steps: int) -> None:
    """The steps in front of the last ten take longer than there is between two saves."""
    run = go(tmp_path / "run", steps, {"seconds": 0.1}, ranks=ranks, wait=(str(steps - 10), "1"))
    began, *saved = [event["time_ns"] / 1e9 for kind in ("started", "saved") for event in run.of(kind)]
    assert 2 <= len(saved) <= 1 + (saved[-1] - began) / 0.1, "storage may be late, but nobody is early"


def test_snapshots_in_memory_between_those_on_storage(tmp_path: Path) -> None:
    run = go(tmp_path / "run", 24, {"steps": 20, "memory_steps": 4})
    assert commits_of(run, "saved") == [20]
