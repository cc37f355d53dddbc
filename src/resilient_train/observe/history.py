"""From the events of a run directory to what the save interval is computed from: failures, time, steps, starts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from resilient_train.events import Event
from resilient_train.observe.timeline import Outcome, Run, read_run
from resilient_train.protocol.controller import EXIT_UNRECOVERABLE

_NS_PER_S = 1e9
_T = TypeVar("_T")


class Standing(msgspec.Struct, frozen=True):
    """Where a job that runs is now."""

    time_ns: int
    step: int


class History(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one directory together. None: the events don't tell."""

    world_size: int | None = None
    trained_s: float = 0.0
    """From all ranks being at their first step to the end, or to the last event, recoveries included."""
    repaired: int = 0
    """Faults that the job survived: they cost no checkpoint."""
    ended: int = 0
    """Faults that ended a run: exit code 75, or no end at all, which is what a lost node or launcher leaves."""
    injected: int = 0
    """Faults of either kind that somebody had ordered. They say nothing of the machine, and are in no other number."""
    step_s: float | None = None
    """Mean time of a step, without recoveries, of the newest run that tells."""
    start_s: float | None = None
    """Median time from the launch to all ranks being at their first step: what a restart takes at least."""


def read_history(runs: Sequence[Sequence[Event]], running: Standing | None = None) -> History:
    """The history of the runs, oldest first, each the events of one. ``running``: of the newest one, if it runs now."""
    found = [
        _one(events, newest=index == len(runs) - 1, running=running if index == len(runs) - 1 else None)
        for index, events in enumerate(runs)
    ]
    starts = [each.start_s for each in found if each.start_s is not None]
    return History(
        world_size=_newest([each.world_size for each in found]),
        trained_s=sum(each.trained_s for each in found),
        repaired=sum(each.repaired for each in found),
        ended=sum(each.ended for each in found),
        injected=sum(each.injected for each in found),
        step_s=_newest([each.step_s for each in found]),
        start_s=statistics.median(starts) if starts else None,
    )


def _one(events: Sequence[Event], *, newest: bool, running: Standing | None) -> History:
    run = read_run(events)
    ordered = sorted(events, key=lambda event: event.time_ns)
    started = next((event for event in ordered if event.kind == "started"), None)
    if started is None:
        return History(world_size=run.world_size)
    begun = started.time_ns
    launched = next((event.time_ns for event in ordered if event.kind == "run_start"), None)
    over = next((event.time_ns for event in ordered if event.kind in ("finished", "job_end")), None)
    until = over or (running.time_ns if running else ordered[-1].time_ns)
    survived = [each for each in run.recoveries if each.outcome in (Outcome.RESUMED, Outcome.SUPERSEDED)]
    repaired = sum(not each.injected for each in survived)
    ended = run.exit_code == EXIT_UNRECOVERABLE or (over is None and not newest)
    ordered_end = ended and _injected_last(ordered)
    return History(
        world_size=run.world_size,
        trained_s=max(0, until - begun) / _NS_PER_S,
        repaired=repaired,
        ended=int(ended and not ordered_end),
        injected=len(survived) - repaired + int(ordered_end),
        step_s=_step_s(run, ordered, started, running),
        start_s=None if launched is None else max(0, begun - launched) / _NS_PER_S,
    )


def _injected_last(ordered: Sequence[Event]) -> bool:
    """Whether somebody's fault came after the last recovery: then it is what ended the run."""
    kinds = [event.kind for event in ordered if event.kind in ("injected", "resumed")]
    return kinds[-1:] == ["injected"]


def _step_s(run: Run, ordered: Sequence[Event], started: Event, running: Standing | None) -> float | None:
    first = started.detail.get("step")
    base = first if isinstance(first, int) else 0
    known = [Standing(event.time_ns, event.step) for event in ordered if event.kind in ("done", "session_end")]
    last = max([*known, *([running] if running else [])], key=lambda standing: standing.step, default=None)
    if last is None or last.step <= base:
        return None
    repaired_ns = sum(each.end_ns - each.fault_ns for each in run.recoveries if each.end_ns <= last.time_ns)
    trained_ns = last.time_ns - started.time_ns - repaired_ns
    return trained_ns / (last.step - base) / _NS_PER_S if trained_ns > 0 else None


def _newest(values: Sequence[_T | None]) -> _T | None:
    return next((value for value in reversed(values) if value is not None), None)
