"""From the events of a run directory to what the save interval is computed from: failures, time, steps, starts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from resilient_train.events import Event
from resilient_train.observe.fields import seconds_of
from resilient_train.observe.sinks import EVENTS_FILE, read_events
from resilient_train.observe.timeline import RecoveryOutcome, Run, read_run
from resilient_train.protocol.job import EXIT_UNRECOVERABLE

_NS_PER_S = 1e9
_T = TypeVar("_T")


class LatestStep(msgspec.Struct, frozen=True):
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
    gone_back: int = 0
    """Faults after which all ranks of a run started again, from what was saved or from the beginning."""
    by_memory: int = 0
    """Of ``ended`` and ``gone_back``: after how many the job went on from snapshots in memory."""
    injected: int = 0
    """Faults of either kind that somebody had ordered. They say nothing of the machine, and are in no other number."""
    step_s: float | None = None
    """Mean time of a step, without recoveries, of the newest run that tells."""
    start_s: float | None = None
    """Median time from the launch to all ranks being at their first step: what a restart takes at least."""
    stall_s: float | None = None
    """Median training time that a save to storage cost, of the newest run that tells."""
    latency_s: float | None = None
    """Median time from such a save's begin until it was on storage."""
    memory_stall_s: float | None = None
    """The same as ``stall_s`` of a save in memory; None where the newest run with saves had none."""

    @property
    def by_storage(self) -> int:
        """The others of them: only a checkpoint on storage could do."""
        return self.ended + self.gone_back - self.by_memory


def history_of(run_dir: Path, running: LatestStep | None = None) -> History:
    """The history of all runs in a directory, that of a run without events being empty. Raises OSError."""
    return read_history(events_of(run_dir), running)


def events_of(run_dir: Path) -> list[list[Event]]:
    """Of each run in a directory, the oldest first. Raises OSError."""
    return [read_events(path) for path in (*of_earlier_runs(run_dir), run_dir / EVENTS_FILE) if path.exists()]


def of_earlier_runs(run_dir: Path) -> list[Path]:
    """Files of events that were set aside, the oldest first."""
    older = [path for path in run_dir.glob("events-*.jsonl") if path.stem.removeprefix("events-").isdecimal()]
    return sorted(older, key=lambda path: int(path.stem.removeprefix("events-")))


def read_history(runs: Sequence[Sequence[Event]], running: LatestStep | None = None) -> History:
    """The history of the runs, oldest first, each the events of one. ``running``: of the newest one, if it runs now."""
    found = list[History]()
    for index, events in enumerate(runs):
        newest = index == len(runs) - 1
        failed = bool(found and found[-1].ended)
        found.append(_one(events, newest=newest, running=running if newest else None, failed=failed))
    starts = [each.start_s for each in found if each.start_s is not None]
    saving = next((each for each in reversed(found) if each.stall_s is not None), History())
    return History(
        world_size=_newest([each.world_size for each in found]),
        trained_s=sum(each.trained_s for each in found),
        repaired=sum(each.repaired for each in found),
        ended=sum(each.ended for each in found),
        gone_back=sum(each.gone_back for each in found),
        by_memory=sum(each.by_memory for each in found),
        injected=sum(each.injected for each in found),
        step_s=_newest([each.step_s for each in found]),
        start_s=statistics.median(starts) if starts else None,
        stall_s=saving.stall_s,
        latency_s=saving.latency_s,
        memory_stall_s=saving.memory_stall_s,
    )


def _one(events: Sequence[Event], *, newest: bool, running: LatestStep | None, failed: bool) -> History:
    """Of one run. ``failed``: a fault had ended the run before."""
    run = read_run(events)
    ordered = sorted(events, key=lambda event: event.time_ns)
    started = next((event for event in ordered if event.kind == "started"), None)
    back = _going_back(ordered, failed)
    if started is None:
        return History(world_size=run.world_size, by_memory=back.by_memory)
    begun = started.time_ns
    launched = next((event.time_ns for event in ordered if event.kind == "run_start"), None)
    over = next((event.time_ns for event in ordered if event.kind in ("finished", "job_end")), None)
    until = over or (running.time_ns if running else ordered[-1].time_ns)
    survived = [
        each for each in run.recoveries if each.outcome in (RecoveryOutcome.RESUMED, RecoveryOutcome.SUPERSEDED)
    ]
    repaired = sum(not each.injected for each in survived)
    ended = run.exit_code == EXIT_UNRECOVERABLE or (over is None and not newest)
    ordered_end = ended and _injected_last(ordered)
    return History(
        world_size=run.world_size,
        trained_s=max(0, until - begun) / _NS_PER_S,
        repaired=repaired,
        ended=int(ended and not ordered_end),
        gone_back=back.times,
        by_memory=back.by_memory,
        injected=len(survived) - repaired + int(ordered_end) + back.injected,
        step_s=_step_s(run, ordered, started, running),
        start_s=None if launched is None else max(0, begun - launched) / _NS_PER_S,
        stall_s=_median(ordered, "stall_s"),
        latency_s=_median(ordered, "latency_s"),
        memory_stall_s=_median(ordered, "memory_stall_s"),
    )


def _median(ordered: Sequence[Event], key: str) -> float | None:
    """Of what the run's saves cost; None if none of them tells."""
    costs = [cost for event in ordered if event.kind == "save_cost" and (cost := seconds_of(event, key)) is not None]
    return statistics.median(costs) if costs else None


class _Back(NamedTuple):
    """How often all ranks of a run started again after they had trained."""

    times: int
    by_memory: int
    injected: int


def _going_back(ordered: Sequence[Event], failed: bool) -> _Back:
    times = by_memory = injected = 0
    trained = ordered_fault = False
    source: object = None
    for event in ordered:
        match event.kind:
            case "injected":
                ordered_fault = True
            case "resumed":
                ordered_fault = False
            case "restored":
                source = event.detail.get("source")
            case "started":
                by_memory += failed and source == "memory"
                trained, failed, source = True, False, None
            case "restart_all" if trained:  # else the way back itself has failed, and another one is tried
                times += not ordered_fault
                injected += ordered_fault
                failed, trained, ordered_fault = not ordered_fault, False, False
    return _Back(times, by_memory + (failed and source == "memory"), injected)


def _injected_last(ordered: Sequence[Event]) -> bool:
    """Whether somebody's fault came after the last recovery: then it is what ended the run."""
    kinds = [event.kind for event in ordered if event.kind in ("injected", "resumed")]
    return kinds[-1:] == ["injected"]


def _step_s(run: Run, ordered: Sequence[Event], started: Event, running: LatestStep | None) -> float | None:
    first = started.detail.get("step")
    base = first if isinstance(first, int) else 0
    known = [LatestStep(event.time_ns, event.step) for event in ordered if event.kind in ("done", "session_end")]
    last = max([*known, *([running] if running else [])], key=lambda standing: standing.step, default=None)
    if last is None or last.step <= base:
        return None
    repaired_ns = sum(each.end_ns - each.fault_ns for each in run.recoveries if each.end_ns <= last.time_ns)
    trained_ns = last.time_ns - started.time_ns - repaired_ns - _paused_ns(ordered, last.time_ns)
    return trained_ns / (last.step - base) / _NS_PER_S if trained_ns > 0 else None


def _paused_ns(ordered: Sequence[Event], until_ns: int) -> int:
    """How long all stood, because somebody wanted it; repairs in between are no part of it."""
    total_ns, since_ns = 0, -1
    for event in ordered:
        if event.time_ns > until_ns:
            break
        if event.kind == "paused":
            since_ns = event.time_ns
        elif event.kind in ("resumed", "fault", "leaving", "restart_all") and since_ns >= 0:
            total_ns, since_ns = total_ns + event.time_ns - since_ns, -1
    return total_ns


def _newest(values: Sequence[_T | None]) -> _T | None:
    return next((value for value in reversed(values) if value is not None), None)
