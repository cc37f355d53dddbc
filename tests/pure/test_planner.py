"""Two intervals from what a job measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pure.stories import at, beginning, one_kill, write
from resilient_train.session.saves.autosave import ByAdvice, planner_of
from resilient_train.session.saves.cadence import Due
from resilient_train.state.advisor import Advisor
from resilient_train.state.failures import AtoInfo, FailureRate
from resilient_train.state.interval import Tier
from resilient_train.state.nested import Nested, nested_overhead, nested_steps
from resilient_train.state.planner import Planner, SavePlan

HOUR_S = 3600.0


def planner(memory_mtbf_s: float = 2 * HOUR_S, storage_mtbf_s: float = 24 * HOUR_S) -> Planner:
    return Planner(Advisor(FailureRate(1, memory_mtbf_s)), Advisor(FailureRate(1, storage_mtbf_s)))


def measured(plan: Planner, *, step_s: float = 0.5, memory_s: float = 0.1, stored_s: float = 3.1) -> Planner:
    for _ in range(20):
        plan.step(step_s)
    plan.kept(memory_s)
    plan.stored(stored_s, 20.0)
    return plan


def test_it_begins_with_what_measures_soon() -> None:
    fresh = planner()
    assert fresh.plan() == SavePlan(10, 20)
    fresh.step(1.0)
    fresh.kept(0.1)
    assert fresh.plan() == SavePlan(10, 20), "storage is not measured yet"


def test_the_plan_is_the_exact_optimum() -> None:
    source = measured(planner())
    assert source.storage.tier is not None
    assert source.storage.tier.latency_s == pytest.approx(16.9), "20 s from the save's begin, 3.1 s of them its stall"
    plan = source.plan()
    memory, storage = Tier(stall_s=0.1, mtbf_s=2 * HOUR_S), Tier(stall_s=3.0, mtbf_s=24 * HOUR_S, latency_s=16.9)
    best = nested_steps(memory, storage, 0.5)
    assert plan.storage_steps % plan.memory_steps == 0

    def cost(steps: tuple[int, int]) -> float:
        return nested_overhead(Nested(steps[0] * 0.5, steps[1] // steps[0]), memory, storage)

    assert cost(plan) <= 1.001 * cost(best)
    assert cost(plan) < 0.2 * cost((10, 20)), "where it had begun"


def test_a_storage_that_is_slow_bounds_its_interval() -> None:
    slow = planner()
    for _ in range(20):
        slow.step(0.5)
    slow.kept(0.001)
    slow.stored(0.002, 900.0)
    plan = slow.plan()
    assert plan.storage_steps * 0.5 >= 900
    assert plan.memory_steps * 0.5 < 900


def test_noise_moves_nothing() -> None:
    steady = measured(planner())
    first = steady.plan()
    for stall_s in (2.9, 3.3, 3.0, 3.4):
        steady.stored(stall_s, 21.0)
        assert steady.plan() == first
    for _ in range(15):
        steady.kept(1.0)
    assert steady.plan() != first


class Told(list):
    def __call__(self, kind: str, detail: dict[str, Any]) -> None:
        self.append((kind, detail))


def walk(rhythm: ByAdvice, steps: range) -> dict[int, Due]:
    found: dict[int, Due] = {}
    for commits in steps:
        due = rhythm.choose(commits, 0.0, busy=False)
        if due:
            rhythm.chosen(commits, due, 0.0)
            found[commits] = due
    return found


def test_the_rhythm_follows_the_plan_and_tells_why() -> None:
    events = Told()
    source = planner()
    rhythm = ByAdvice(source, events, None)
    assert walk(rhythm, range(1, 21)) == {10: Due.MEMORY, 20: Due.STORAGE}
    assert not events, "nothing is measured yet"
    measured(source)
    assert walk(rhythm, range(21, 41)) == {30: Due.MEMORY, 40: Due.STORAGE}
    ((kind, detail),) = events
    assert kind == "save_interval"
    assert detail["memory_steps"] < detail["steps"]
    assert (detail["memory_stall_s"], detail["stall_s"], detail["step_s"]) == (0.1, 3.0, 0.5)
    assert detail["failures"] == 0
    assert 0 < detail["cost"] < 0.1
    after = walk(rhythm, range(41, 41 + detail["steps"]))
    assert next(iter(after)) == 40 + detail["memory_steps"]
    assert after[40 + detail["steps"]] is Due.STORAGE
    assert list(after.values()).count(Due.STORAGE) == 1
    assert len(events) == 1


def test_while_storage_is_busy_it_keeps_to_memory() -> None:
    rhythm = ByAdvice(planner(), Told(), None)
    walk(rhythm, range(1, 20))
    assert rhythm.choose(20, 0.0, busy=True) is Due.MEMORY
    assert rhythm.choose(20, 0.0, busy=False) is Due.STORAGE


def test_failures_of_earlier_runs_in_steps() -> None:
    source = planner()
    rhythm = ByAdvice(source, Told(), AtoInfo(failure_count=12, total_steps=7200))
    walk(rhythm, range(1, 15))
    assert source.storage.failures == 0
    measured(source, step_s=0.5)
    walk(rhythm, range(15, 30))
    assert source.storage.failures == 12
    assert source.storage.rate.mtbf_s == pytest.approx((7200 * 0.5 + 10) / 12), "trusted from the tenth on"


def test_a_planner_knows_the_failures_of_its_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", f"{{ARF:1,ATO:1,ATO_THRESHOLD:3,ATO_PATH:{tmp_path}/none.json}}")
    lost = [
        *beginning(),
        *[event for event in one_kill() if event.kind != "injected"],
        at(9000, "restart_all", 1, 1, reason="all ranks are lost", attempt=1),
        at(9500, "restored", 0, 1, source="memory", commits=8, path=""),
        at(9600, "started", generation=1),
        at(15_000, "straggler", generation=1),
    ]
    write(tmp_path, lost)
    (tmp_path / "events.jsonl").rename(tmp_path / "events-1.jsonl")
    write(tmp_path, [at(60_000, "run_start", world_size=3), at(60_100, "restored", 0, source="storage", commits=8)])
    found, before = planner_of(tmp_path, 3)
    assert before is None
    assert (found.memory.failures, found.storage.failures) == (1, 1)
    (tmp_path / "none.json").write_text('{"failure_count": 2, "total_steps": 50}')
    assert planner_of(tmp_path, 3)[1] == AtoInfo(2, 50)
