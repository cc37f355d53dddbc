"""What a run directory says about failures, steps and starts."""

import pytest

from pure.stories import HOSTILE, at, beginning, normal_end, ns, one_kill, whole_run, write
from resilient_train.events import Event
from resilient_train.observe.history import History, LatestStep, read_history
from resilient_train.observe.sinks import read_events


def real(events: list[Event]) -> list[Event]:
    """The same without the note that somebody had ordered the fault."""
    return [event for event in events if event.kind != "injected"]


def ended(t: float, code: int = 75) -> list[Event]:
    return [at(t, "job_end", code=code, reason="rank 1 was killed; nothing to restore from")]


def shifted(events: list[Event], by_ms: float) -> list[Event]:
    return [
        Event(e.kind, e.time_ns + round(by_ms * 1e6), e.rank, e.incarnation, e.generation, e.step, e.phase, 0, e.detail)
        for e in events
    ]


def test_nothing() -> None:
    assert read_history([]) == History()
    assert read_history([[at(0, "run_start", world_size=8)]]) == History(world_size=8)


def test_a_run_that_survived_a_fault() -> None:
    history = read_history([[*beginning(), *real(one_kill()), *normal_end()]])
    assert (history.repaired, history.ended, history.injected) == (1, 0, 0)
    assert history.world_size == 3
    assert history.trained_s == pytest.approx(4.5)
    assert history.start_s == pytest.approx(0.5)


def test_ordered_faults_are_told_apart() -> None:
    history = read_history([whole_run()])
    assert (history.repaired, history.ended, history.injected) == (0, 0, 1)
    history = read_history([[*beginning(), at(900, "injected", 1, detail={"kind": "kill"}), *ended(1000)]])
    assert (history.repaired, history.ended, history.injected) == (0, 0, 1)
    history = read_history([[*beginning(), *one_kill(), *ended(9000)]])
    assert (history.ended, history.injected) == (1, 1), "the ordered one was repaired, another ended the run"


@pytest.mark.parametrize(("code", "count"), [(75, 1), (1, 0), (130, 0), (0, 0)])
def test_only_a_fault_ends_a_run_with_75(code: int, count: int) -> None:
    assert read_history([[*beginning(), *ended(1000, code)]]).ended == count


def test_a_run_without_an_end_was_lost_if_another_came_after_it() -> None:
    lost = [*beginning(), at(1500, "straggler")]
    after = shifted([*beginning(), *normal_end()], 60_000)
    assert read_history([lost]).ended == 0, "it may still be running"
    history = read_history([lost, after])
    assert history.ended == 1
    assert history.trained_s == pytest.approx(1.0 + 4.5), "the pause between the runs is not training"


def test_steps_are_timed_without_recoveries() -> None:
    last = at(5500, "session_end", 0, step=110, steps=110)
    assert read_history([[*beginning(), last]]).step_s == pytest.approx(5.0 / 110)
    repaired = read_history([[*beginning(), *real(one_kill()), last]])
    assert repaired.step_s == pytest.approx((5.0 - 0.351) / 110)
    assert read_history([[*beginning(), at(600, "done", 0, 1, step=0)]]).step_s is None, "no step was trained"


def test_steps_count_from_where_the_run_began() -> None:
    start = [at(0, "run_start", world_size=2), at(500, "started", detail={"step": 1000})]
    assert read_history([[*start, at(2500, "session_end", 0, step=1010)]]).step_s == pytest.approx(0.2)


def test_a_running_job_is_known_up_to_now() -> None:
    history = read_history([beginning()], LatestStep(ns(10_500), 50))
    assert history.trained_s == pytest.approx(10)
    assert history.step_s == pytest.approx(0.2)


def test_the_newest_run_that_tells_speaks_for_steps() -> None:
    first = [*beginning(), at(1500, "session_end", 0, step=10), at(1500, "finished")]
    second = shifted([*beginning(), at(2500, "session_end", 0, step=10), at(2500, "finished")], 60_000)
    third = shifted(beginning(), 120_000)
    assert read_history([first, second, third]).step_s == pytest.approx(0.2)


def test_the_newest_run_that_saved_speaks_for_the_cost_of_saves() -> None:
    def saving(*costs: tuple[float, float | None]) -> list[Event]:
        return [
            at(600, "save_cost", 0, stall_s=stall_s, memory_stall_s=memory_s, latency_s=10 * stall_s)
            for stall_s, memory_s in costs
        ]

    older, newer = [*beginning(), *saving((9.0, 1.0))], [*beginning(), *saving((0.2, None), (0.6, None), (0.3, None))]
    history = read_history([older, newer, beginning()])
    assert (history.stall_s, history.memory_stall_s) == (0.3, None), "a cost in memory of another run is another one"
    assert history.latency_s == 3.0
    odd = [*beginning(), at(600, "save_cost", 0, stall_s="long", memory_stall_s=-1, latency_s=None)]
    assert (read_history([older, odd]).stall_s, read_history([older, odd]).latency_s) == (9.0, 90.0)


def test_hostile_events(tmp_path) -> None:
    run = write(tmp_path, [], tail=HOSTILE)
    history = read_history([read_events(run / "events.jsonl")])
    assert history.step_s is None
    run = write(tmp_path, [at(0, "started", detail={"step": "x"}), at(5, "session_end", 0, step=3)], tail=HOSTILE)
    assert read_history([read_events(run / "events.jsonl")]).trained_s >= 0
