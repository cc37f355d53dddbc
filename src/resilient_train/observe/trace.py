"""Writes a run as a Chrome trace (``trace.json``), which https://ui.perfetto.dev and chrome://tracing open.

One process per rank, and one for the agent. The format counts in microseconds; time 0 is the first event.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from resilient_train.events import AGENT, Event
from resilient_train.observe.timeline import PHASES, Recovery, recoveries

TRACE_FILE = "trace.json"

_EVENTS, _LIFE, _RECOVERY, _FIRST_PHASE = 0, 1, 2, 3
_FIRST_PID = 2
"""pid of rank 0; the agent is 1, for some viewers hide a process 0."""


def write_trace(events: Iterable[Event], path: str | os.PathLike[str]) -> None:
    """Writes the trace, replacing an older one in a single step. Raises OSError."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:  # noqa: PTH123
            file.write(msgspec.json.encode(trace(events)))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def trace(events: Iterable[Event]) -> dict[str, Any]:
    """The trace as a JSON-able object."""
    ordered = sorted(events, key=lambda event: event.time_ns)
    origin = min((event.time_ns - max(0, event.duration_ns) for event in ordered), default=0)
    ranks = sorted({event.rank for event in ordered} - {AGENT})
    entries = [*_names(ranks), *(_entry(event, origin) for event in ordered), *_lives(ordered, origin)]
    for recovery in recoveries(ordered):
        entries += _recovery_entries(recovery, ordered, origin)
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _pid(rank: int) -> int:
    return 1 if rank == AGENT else rank + _FIRST_PID


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _names(ranks: Sequence[int]) -> list[dict[str, Any]]:
    agent_rows = {_EVENTS: "events", _RECOVERY: "recovery"}
    agent_rows |= {_FIRST_PHASE + index: phase for index, phase in enumerate(PHASES)}
    rank_rows = {_EVENTS: "events", _LIFE: "process", _RECOVERY: "recovery"}
    entries = []
    for rank in (AGENT, *ranks):
        name = "agent" if rank == AGENT else f"rank {rank}"
        entries.append(_meta(rank, "process_name", 0, name=name))
        entries.append(_meta(rank, "process_sort_index", 0, sort_index=_pid(rank)))
        for row, label in (agent_rows if rank == AGENT else rank_rows).items():
            entries.append(_meta(rank, "thread_name", row, name=label))
            entries.append(_meta(rank, "thread_sort_index", row, sort_index=row))
    return entries


def _meta(rank: int, what: str, row: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _pid(rank), "tid": row, "args": args}


def _span(name: str, rank: int, row: int, start_ns: int, end_ns: int, **args: Any) -> dict[str, Any]:
    length = _us(max(0, end_ns - start_ns))
    return {
        "ph": "X",
        "name": name,
        "pid": _pid(rank),
        "tid": row,
        "ts": _us(start_ns),
        "dur": length,
        "args": args,
    }


def _entry(event: Event, origin: int) -> dict[str, Any]:
    """An event as a span if it has a length, else as an instant."""
    fields = {name: getattr(event, name) for name in ("generation", "incarnation", "step", "phase")}
    args = {**fields, **event.detail}
    end = event.time_ns - origin
    length = event.duration_ns
    if event.kind == "fetched" and isinstance(told := event.detail.get("duration_ns"), int):
        length = length or told
    if length > 0:
        return _span(event.kind, event.rank, _EVENTS, end - length, end, **args)
    entry = {"ph": "i", "s": "p", "name": event.kind, "pid": _pid(event.rank), "tid": _EVENTS, "ts": _us(end)}
    return {**entry, "args": args}


def _lives(events: Sequence[Event], origin: int) -> list[dict[str, Any]]:
    """For each process that a rank had: a span from its start to its death, its exit or the last event."""
    entries = []
    alive: dict[int, Event] = {}

    def close(rank: int, end_ns: int) -> None:
        start = alive.pop(rank, None)
        if start is not None:
            name = f"incarnation {start.incarnation}"
            entries.append(_span(name, rank, _LIFE, start.time_ns - origin, end_ns - origin, **start.detail))

    for event in events:
        if event.kind == "spawned":
            close(event.rank, event.time_ns)
            alive[event.rank] = event
        elif event.kind == "death_seen":
            close(event.rank, event.time_ns)
        elif event.kind == "exited" and event.rank in alive and alive[event.rank].incarnation == event.incarnation:
            # Reaping the dead takes longer than starting their successor: an exit may be of the one before.
            close(event.rank, event.time_ns)
    for rank in list(alive):
        close(rank, events[-1].time_ns)
    return entries


def _recovery_entries(recovery: Recovery, events: Sequence[Event], origin: int) -> list[dict[str, Any]]:
    """The recovery and its phases in the agent's rows; in each rank's, how long it was out of its step."""
    name = f"recovery {recovery.generation} ({recovery.outcome})"
    start, end = recovery.fault_ns - origin, recovery.end_ns - origin
    entries = [_span(name, AGENT, _RECOVERY, start, end, reason=recovery.reason, lost=list(recovery.lost))]
    for span in recovery.spans:
        row = _FIRST_PHASE + PHASES.index(span.phase)
        entries.append(_span(span.phase, AGENT, row, span.start_ns - origin, span.end_ns - origin))
    for event in events:
        if event.kind == "joined" and event.generation == recovery.generation:
            stopped = event.detail.get("stopped_ns")
            since = stopped if isinstance(stopped, int) and stopped > 0 else event.time_ns
            entries.append(_span(name, event.rank, _RECOVERY, since - origin, end))
    return entries
