"""The agent's hang watch in a recovery: how often a stopped rank is looked at before it is killed."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train.config import Settings
from resilient_train.launch.agent.hang_watch import LOOK_S, HangWatch
from resilient_train.protocol.hang import HangDetector, RunState
from resilient_train.protocol.job import Job, Stage
from resilient_train.protocol.progress import Activity, Progress
from resilient_train.protocol.standing import Phase

RANKS = 3


class Keeper:
    """Remembers who was given up."""

    def __init__(self) -> None:
        self.fenced: list[list[int]] = []

    def fence(self, ranks: Any, reason: str) -> None:
        assert "in the middle of a recovery" in reason
        self.fenced.append(list(ranks))

    def tell_pause(self, paused_s: float, stopped: Any) -> None:
        raise AssertionError("two ranks run")


class Recovery:
    """A job in a recovery, after ``steps`` steps of ``step_ms``."""

    def __init__(self, steps: int, step_ms: float) -> None:
        beats = itertools.count()
        board: Any = SimpleNamespace(
            world_size=RANKS,
            progress=lambda _: (steps, Phase.COMPUTE, 0, Activity.TRAINING),
            beats=lambda _: next(beats),
        )
        self.states = [RunState.RUNNING] * RANKS
        current = {rank: SimpleNamespace(state=lambda rank=rank: self.states[rank]) for rank in range(RANKS)}
        processes: Any = SimpleNamespace(current=current)
        job = Job(RANKS)
        job.stage = Stage.RECOVERING
        reports: Any = SimpleNamespace(look=lambda: None)
        self.watch = HangWatch(board, job, processes, reports, Settings())
        self.keeper: Any = Keeper()
        self.detector: HangDetector = self.watch._detector
        for commits in range(steps):
            ranks = [Progress(commits, Phase.APPLIED, 0, Activity.TRAINING)] * RANKS
            self.detector.observe(int(commits * step_ms * 1e6), ranks, lambda _: RunState.RUNNING)

    def looks(self, most: int = 100) -> int:
        """How many see rank 1 stopped before it is killed; ``most``, if it is not."""
        self.states[1] = RunState.STOPPED
        for count in range(1, most):
            self.watch.look(self.keeper)
            if self.keeper.fenced:
                assert self.keeper.fenced == [[1]]
                return count
        return most


@pytest.mark.parametrize(("step_ms", "looks"), [(10, 3), (50, 3), (75, 4), (200, 9), (3000, 20)])
def test_as_in_a_step_it_is_twice_what_a_usual_one_takes(step_ms: float, looks: int) -> None:
    recovery = Recovery(30, step_ms)
    assert recovery.looks() == looks
    assert looks * LOOK_S <= max(2 * step_ms / 1000, 0.1) + LOOK_S


def test_where_no_steps_are_known_it_is_a_second() -> None:
    assert Recovery(5, 10).looks() == math.ceil(1 / LOOK_S)


def test_who_was_stopped_with_all_others_has_longer() -> None:
    """They are continued one after the other, and what the first ones make of that is a recovery."""
    recovery = Recovery(30, 10)
    recovery.detector.resume()
    assert recovery.looks() == math.ceil(1 / LOOK_S)


@pytest.mark.parametrize("between", [1, 2, 8])
def test_who_are_stopped_one_after_the_other_are_named_together(between: int) -> None:
    """Named one after the other, the first is killed because the second has its state, and then that one is alone."""
    recovery = Recovery(30, 200)
    assert recovery.looks(most=between + 1) == between + 1
    recovery.states[2] = RunState.STOPPED
    for _ in range(8):
        recovery.watch.look(recovery.keeper)
    assert recovery.keeper.fenced == []
    recovery.watch.look(recovery.keeper)
    assert recovery.keeper.fenced == [[1, 2]]


def test_whoever_goes_on_is_not_killed() -> None:
    recovery = Recovery(30, 200)
    for _ in range(5):
        assert recovery.looks(most=8) == 8
        recovery.states[1] = RunState.RUNNING
        recovery.watch.look(recovery.keeper)
