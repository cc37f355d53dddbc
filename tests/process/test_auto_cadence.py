"""``save_every("auto")`` where a save costs something: minutes of a model with ten million parameters."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
from running import launch

from resilient_train.events import Event
from resilient_train.observe.sinks import EVENTS_FILE, JsonLines
from resilient_train.state.interval import Tier
from resilient_train.state.nested import Nested, nested_overhead

STEPS = 1000
FAILURES, APART_S = 24, 300
"""In the run before: every other one needed a checkpoint on storage. More than ten are trusted: one in 600 s each.

So seldom that ten steps, with which it begins, are far too few."""


def fail_often(run_dir: Path) -> None:
    """An earlier run in this directory, of which nothing but its events is left."""
    run_dir.mkdir()
    sink = JsonLines(run_dir / EVENTS_FILE.replace(".", "-1."))

    def write(time_s: float, kind: str, **detail: Any) -> None:
        sink.write(Event(kind, round((1_790_000_000 + time_s) * 1e9), detail=detail))

    write(0, "run_start", world_size=2, argv=["wide.py"])
    write(0, "started", step=0)
    for number in range(1, FAILURES + 1):
        write(number * APART_S, "restart_all", reason="all ranks are lost", attempt=number)
        write(number * APART_S + 0.1, "restored", source=("memory", "storage")[number % 2], commits=number, path="")
        write(number * APART_S + 0.2, "started", step=number)
    write((FAILURES + 0.5) * APART_S, "finished")
    sink.close()


def best_cost(memory: Tier, storage: Tier, step_s: float) -> tuple[float, int, int]:
    """By trying: the least cost, and the steps between saves in memory and to storage that have it."""
    plans = (
        (nested_overhead(Nested(steps * step_s, count), memory, storage), steps, steps * count)
        for steps, count in itertools.product(range(1, 400), range(1, 41))
        if steps * count * step_s >= storage.shortest_s
    )
    return min(plans)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_auto_settles_where_saves_and_failures_cost_least(tmp_path: Path) -> None:
    fail_often(tmp_path / "run")
    run = launch(tmp_path / "run", "wide.py", "--steps", str(STEPS), ranks=2, timeout_s=500)
    assert run.code == 0, run.explain()
    assert not run.of("save_off") + run.of("save_failed") + run.of("save_skipped"), run.explain()
    told = [event["detail"] for event in run.of("save_interval")]
    costs = [event["detail"] for event in run.of("save_cost")]
    plan = told[-1]
    print("plans:", [(each["memory_steps"], each["steps"]) for each in told], plan)

    # The failures of the run before, and the time since.
    assert FAILURES / 2 * plan["mtbf_s"] == pytest.approx(FAILURES * APART_S, rel=0.1)
    assert plan["memory_mtbf_s"] == pytest.approx(plan["mtbf_s"], rel=0.01)

    # What it cost is measured once more, by everything that was told of it: the plan may be older than the last saves.
    late = costs[-15:]
    step_s = statistics.median(each["window_s"] for each in late)
    # A plan with no saves between those to storage measures none of them any more.
    memory_s = statistics.median([cost["memory_stall_s"] for cost in costs if cost["memory_stall_s"] is not None][-15:])
    stored_s = statistics.median(each["stall_s"] for each in late)
    taken_s = statistics.median(each["latency_s"] for each in late)
    memory = Tier(stall_s=memory_s, mtbf_s=plan["memory_mtbf_s"])
    more_s, latency_s = max(0.0, stored_s - memory_s), max(0.0, taken_s - stored_s)
    storage = Tier(stall_s=more_s, mtbf_s=plan["mtbf_s"], latency_s=latency_s)
    best, *steps = best_cost(memory, storage, step_s)
    mine = Nested(plan["memory_steps"] * step_s, plan["steps"] // plan["memory_steps"])
    cost = nested_overhead(mine, memory, storage)
    print(f"step {step_s:.4f} s; {memory}; {storage}; best {steps}: {best:.5f}, kept: {cost:.5f}; {len(costs)} saves")
    begun = nested_overhead(Nested(10 * step_s, 2), memory, storage)
    print(f"as it began: {begun:.5f}")
    assert begun > 1.25 * best, "else this test shows nothing"
    assert cost <= 1.1 * best

    # And that is what it did: it keeps the last plan, but where storage was busy for longer than usual.
    saved = [event["detail"]["commits"] for event in run.of("saved")]
    assert len(costs) >= 8
    gaps = [after - before for before, after in itertools.pairwise(saved)][-5:]
    assert statistics.median(gaps) == pytest.approx(plan["steps"], rel=0.3), (saved, told)
    assert all(gap * step_s > latency_s * 0.5 for gap in gaps)
