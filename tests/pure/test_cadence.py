"""When all ranks save: rank 0 leads, the others look, and no two ranks ever see another thing for the same window."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_train._native import Board
from resilient_train.errors import ConfigError
from resilient_train.session.saves import cadence
from resilient_train.session.saves.cadence import BySeconds, BySteps, Cadence, Due, Wish, wish
from resilient_train.session.saves.save_cost import Meter

STEPS = 40


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cadence, "time", clock)
    return clock


class Leader:
    """Rank 0 of a job, alone, and what it writes."""

    def __init__(self, rhythm: Any, learner: Any = None) -> None:
        self.board = Board.create(1)
        self.events: list[tuple[str, dict[str, Any]]] = []

        def event(kind: str, detail: dict[str, Any]) -> None:
            self.events.append((kind, detail))

        self.skipped: list[int] = []
        self.cadence = Cadence(
            self.board, rhythm, Meter(learner, event), lambda commits, _: self.skipped.append(commits)
        )

    def run(self, clock: Clock, updates: range, *, step_s: float = 1.0, flush: int = 1) -> dict[int, Due]:
        """A checkpoint is on storage so many updates after its snapshot was begun."""
        found: dict[int, Due] = {}
        for commits in updates:
            stored = commits - flush
            if found.get(stored) is Due.STORAGE:
                self.board.settle(stored)
            due = self.cadence.head(commits)
            if due:
                found[commits] = due
            clock.now_s += step_s
        return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, None, None, None), "exactly one"),
        (("auto", 5, None, None), "exactly one"),
        ((None, 5, 3.0, None), "exactly one"),
        (("often", None, None, None), '"auto"'),
        ((None, 0, None, None), "1 or more"),
        ((None, None, 0.0, None), "above 0"),
        ((None, None, float("nan"), None), "above 0"),
        ((None, None, float("inf"), None), "above 0"),
        ((None, 10, None, 3), "divisor"),
        ((None, 10, None, 0), "divisor"),
        ((None, None, 5.0, 3), "steps="),
        (("auto", None, None, 3), "steps="),
    ],
)
def test_what_can_not_be_asked_for(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wish(*arguments)


def test_what_can() -> None:
    assert wish("auto", None, None, None) == Wish(auto=True)
    assert wish(None, 12, None, 4) == Wish(steps=12, memory_steps=4)
    assert wish(None, None, 2.5, None) == Wish(seconds=2.5)


def test_by_steps(clock: Clock) -> None:
    assert Leader(BySteps(1)).run(clock, range(5)) == dict.fromkeys(range(1, 5), Due.STORAGE)
    slow = Leader(BySteps(1)).run(clock, range(12), flush=4)
    assert slow == {1: 2, 2: 2, 7: 2, 8: 2}, "two at once at most: there are two slots"
    found = Leader(BySteps(6, 2)).run(clock, range(13))
    assert found == {2: 1, 4: 1, 6: 2, 8: 1, 10: 1, 12: 2}
    assert Leader(BySteps(4)).run(clock, range(9, 14)) == {12: Due.STORAGE}, "a job that goes on from 9"
    assert Leader(BySteps(0, 3)).run(clock, range(8)) == {3: Due.MEMORY, 6: Due.MEMORY}, "nothing for storage"


@pytest.mark.parametrize(("step_s", "between"), [(1.0, {10}), (0.1, {100}), (7.0, {2}), (25.0, {2})])
def test_by_seconds(clock: Clock, step_s: float, between: set[int]) -> None:
    found = list(Leader(BySeconds(10.0, clock.now_s)).run(clock, range(round(40 * max(between))), step_s=step_s))
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert set(gaps[1:]) <= between
    assert len(gaps) > 20


def test_while_storage_is_busy_one_more_snapshot_stays_in_memory(clock: Clock) -> None:
    leader = Leader(BySteps(4, 1))
    found = leader.run(clock, range(13), flush=6)
    # 4 is on storage at the head of 10; 11 is what can be announced then, and 12 is due for storage again.
    assert found == {1: 1, 2: 1, 3: 1, 4: 2, 5: 1, 11: 1, 12: 2}
    assert leader.skipped == [8]


def test_a_recovery_ends_the_waiting_for_storage(clock: Clock) -> None:
    leader = Leader(BySteps(4))
    assert leader.run(clock, range(6), flush=100) == {4: Due.STORAGE}
    leader.board.raise_stop(1)
    assert leader.run(clock, range(6, 10), flush=100) == {8: Due.STORAGE}
    assert not leader.skipped


@given(st.integers(0, 2**32), st.sampled_from([BySteps(1), BySteps(6, 2), BySteps(5)]))
def test_all_ranks_see_the_same_whenever_they_look(seed: int, rhythm: BySteps) -> None:
    """Ranks run freely between barriers; each looks at the head of its window, some time before it is READY."""
    draw = random.Random(seed)
    board = Board.create(4)
    ranks = [
        Cadence(board, rhythm if r == 0 else None, Meter(None, _silent) if r == 0 else None, _silent) for r in range(4)
    ]
    seen: list[dict[int, Due]] = [{} for _ in ranks]
    ready = [-1] * 4
    while min(ready) < STEPS:
        rank = draw.choice([r for r in range(4) if ready[r] <= min(ready)])
        commits = ready[rank] + 1
        seen[rank][commits] = ranks[rank].head(commits)
        if seen[0].get(commits) is Due.STORAGE:
            board.settle(commits)
        ready[rank] = commits
    last = min(ready)
    for commits in range(last + 1):
        assert len({each[commits] for each in seen}) == 1, f"window {commits}"
    assert {commits for commits in range(1, last) if seen[0][commits]}


def _silent(_kind: str, _detail: dict[str, Any]) -> None:
    pass


class Learner:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def step(self, duration_s: float) -> None:
        pass

    def kept(self, stall_s: float) -> None:
        self.told.append(("kept", round(stall_s, 6)))

    def stored(self, stall_s: float, latency_s: float) -> None:
        self.told.append(("stored", round(stall_s, 6), round(latency_s, 6)))


def test_a_save_costs_by_how_much_its_windows_are_longer() -> None:
    learner = Learner()
    events: list[dict[str, Any]] = []
    meter = Meter(learner, lambda _kind, detail: events.append(detail))
    now_s = 0.0
    for window in range(40):
        meter.head(now_s, whole=True)
        if window == 34:
            meter.ended(now_s, measured=True)
        if window == 20:
            meter.begun(20, now_s, stored=False)
        if window == 30:
            meter.begun(30, now_s, stored=True)
            meter.waited(0.25)
        now_s += {20: 1.5, 30: 3.0, 31: 1.1}.get(window, 1.0)
    assert learner.told == [("kept", 0.5), ("stored", 2.1, 6.1)]
    (cost,) = events
    assert cost == {
        "commits": 30, "stall_s": pytest.approx(2.1), "waited_s": 0.25, "latency_s": pytest.approx(6.1),
        "memory_stall_s": pytest.approx(0.5), "window_s": 1.0,
    }  # fmt: skip


def test_what_the_training_thread_waited_is_the_least_that_a_save_costs() -> None:
    learner = Learner()
    meter = Meter(learner, _silent)
    for second in range(5):
        meter.head(second, whole=True)
        if second == 2:
            meter.begun(2, second, stored=False)
            meter.waited(0.01)
            meter.waited(0.03)
    assert learner.told == [("kept", 0.04)]


def test_a_recovery_is_no_cost_of_a_save() -> None:
    learner = Learner()
    meter = Meter(learner, _silent)
    for second in range(4):
        meter.head(second, whole=True)
    meter.begun(3, 3.0, stored=True)
    meter.head(60.0, whole=False)
    meter.ended(60.0, measured=False)
    assert learner.told == []
