"""What a run saved, what it began from, and which updates it lost although they were made.

Updates are lost in two ways: all ranks go back to a state that was saved earlier, or the job ends and no checkpoint has
them. How far the job had come is the furthest update that any event knows of; the agent reads it off the ranks' own
records when all start again (``restart_all``) and when the job ends (``job_end``).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from resilient_train.events import Event
from resilient_train.observe.fields import number_of, text_of

_NS_PER_S = 1e9
_STANDS = frozenset(
    {"joined", "plan", "resumed", "saved", "session_end", "restart_all", "job_end", "save_cost", "left_in_memory"}
)
"""Events whose ``commits`` some rank had reached."""


class SavedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that is complete on storage."""

    step: int | None
    commits: int | None
    path: str | None
    duration_s: float | None
    """From all ranks having their snapshots to its being complete."""


class NotSaved(msgspec.Struct, frozen=True):
    """Why there is no checkpoint of a step."""

    step: int | None
    reason: str


class Origin(msgspec.Struct, frozen=True):
    """A saved state that all ranks took up. ``source``: memory or storage."""

    source: str
    commits: int | None
    path: str


class WayBack(msgspec.Struct, frozen=True):
    """All ranks started again after they had trained. ``origin`` is None where they began anew."""

    reason: str
    furthest: int
    """Updates that had been made."""
    origin: Origin | None

    @property
    def updates_lost(self) -> int | None:
        """Updates that were made and thrown away; None if the events do not tell."""
        kept = self.origin.commits if self.origin else 0
        return None if kept is None else max(0, self.furthest - kept)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, each in the order in which it happened."""

    written: tuple[SavedCheckpoint, ...] = ()
    left_out: tuple[NotSaved, ...] = ()
    """Once for each step, however many ranks it was due to."""
    failed: tuple[NotSaved, ...] = ()
    off: dict[int, str] = {}
    """Rank -> why it took no snapshots any more."""
    passed_over: dict[str, str] = {}
    """Path of a checkpoint that a start did not take -> why."""
    begun_from: Origin | None = None
    """What the run's first start took up."""
    ways_back: tuple[WayBack, ...] = ()
    lost_at_end: int | None = None
    """Updates that no checkpoint had when the job ended before its time; None: it did not, or it is not known."""

    @property
    def median_s(self) -> float | None:
        """Median time in which a checkpoint was written; None if none was."""
        known = [each.duration_s for each in self.written if each.duration_s is not None]
        return statistics.median(known) if known else None

    @property
    def updates_lost(self) -> int:
        """Updates that were made and lost, as far as it is known: by going back, and at the job's end."""
        return sum(each.updates_lost or 0 for each in self.ways_back) + (self.lost_at_end or 0)


def read_saved(ordered: Sequence[Event]) -> Saved:
    """From a run's events, sorted by time."""
    written = [event for event in ordered if event.kind == "saved"]
    begun_from, ways_back, lost_at_end = _course(ordered)
    return Saved(
        written=tuple(map(_as_written, written)),
        left_out=_troubles(ordered, "save_skipped"),
        failed=_troubles(ordered, "save_failed"),
        off={
            event.rank: _reason(event)
            for event in ordered
            if event.kind == "save_off" and number_of(event, "follows") is None
        },
        passed_over={
            path: _reason(event)
            for event in ordered
            if event.kind == "checkpoint_skipped" and (path := text_of(event, "path"))
        },
        begun_from=begun_from,
        ways_back=ways_back,
        lost_at_end=lost_at_end,
    )


def _course(ordered: Sequence[Event]) -> tuple[Origin | None, tuple[WayBack, ...], int | None]:
    """Where the first start began, each way back, and what was lost at the end."""
    furthest = stored = 0
    origin: Origin | None = None
    begun_from: Origin | None = None
    ways_back = list[WayBack]()
    cut: Event | None = None
    trained = known = False
    lost_at_end: int | None = None
    for event in ordered:
        reached = number_of(event, "commits") if event.kind in _STANDS else None
        if reached is not None:
            furthest, known = max(furthest, reached), True
        match event.kind:
            case "restored":
                source, path = text_of(event, "source") or "", text_of(event, "path") or ""
                origin = Origin(source, number_of(event, "commits"), path)
            case "saved" | "left_in_memory":
                stored = stored if reached is None else reached
                if lost_at_end is not None:  # from memory, by who looks after it to the last
                    lost_at_end = max(0, furthest - stored)
            case "restart_all":
                # Before `started` the way back itself has failed, and another one is tried.
                cut, trained, origin = event if trained else cut, False, None
            case "started":
                if cut is None:
                    begun_from = origin
                else:
                    ways_back.append(WayBack(_reason(cut), furthest, origin))
                furthest = (origin.commits or 0) if origin else 0
                if origin is None or origin.source == "storage":
                    stored = furthest
                known = known or origin is None or origin.commits is not None
                cut, trained = None, True
            case "job_end" if (trained or cut) and known and number_of(event, "code") not in {0, None}:
                # Snapshots in memory do not count, which go with their holder, unless `left_in_memory` follows.
                lost_at_end = max(0, furthest - stored)
    return begun_from, tuple(ways_back), lost_at_end


def _as_written(event: Event) -> SavedCheckpoint:
    took_ns = number_of(event, "duration_ns")
    duration_s = None if took_ns is None else took_ns / _NS_PER_S
    return SavedCheckpoint(number_of(event, "step"), number_of(event, "commits"), text_of(event, "path"), duration_s)


def _troubles(ordered: Sequence[Event], kind: str) -> tuple[NotSaved, ...]:
    """The first reason for each step."""
    found: dict[int | None, NotSaved] = {}
    for event in ordered:
        if event.kind == kind:
            step = number_of(event, "step")
            found.setdefault(step, NotSaved(step, _reason(event)))
    return tuple(found.values())


def _reason(event: Event) -> str:
    return text_of(event, "reason") or "no reason given"
