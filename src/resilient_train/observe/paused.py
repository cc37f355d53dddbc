"""The pauses of a run: who asked for each, how soon all ranks stood, where, how long, and what befell them there."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from resilient_train.events import Event
from resilient_train.observe.fields import number_of, ranks_of, text_of

_NS_PER_S = 1e9
_ENDS = frozenset({"finished", "job_end"})


class PauseOutcome(enum.StrEnum):
    """How a pause ended. UNFINISHED: the events end before it does."""

    RESUMED = "resumed"
    WITHDRAWN = "withdrawn"
    """Taken back before all ranks stood."""
    NOT_REACHED = "not reached"
    """The job ended before all ranks stood."""
    JOB_ENDED = "the job ended in it"
    UNFINISHED = "unfinished"


class PauseRecord(msgspec.Struct, kw_only=True):
    """One wish, and what came of it. Times in nanoseconds; None: it did not come to that."""

    by: str
    """``operator``, or ``rank N`` for its script."""
    at_step: int | None
    """Before which step all were to stand; 0: before the next one."""
    asked_ns: int
    first_ns: int | None = None
    """The first rank stood there."""
    stood_ns: int | None = None
    """All ranks did."""
    step: int | None = None
    """Before which they stood."""
    length_ns: int = 0
    """For how long all stood, with the repairs of faults in it."""
    inside: list[str] = msgspec.field(default_factory=list)
    """What happened meanwhile, for people."""
    outcome: PauseOutcome = PauseOutcome.UNFINISHED

    @property
    def wait_s(self) -> float | None:
        """From the wish to all ranks standing; with a step far off that is the training up to it."""
        return None if self.stood_ns is None else max(0, self.stood_ns - self.asked_ns) / _NS_PER_S

    @property
    def gather_s(self) -> float | None:
        """From the first rank standing to all."""
        if self.stood_ns is None or self.first_ns is None:
            return None
        return max(0, self.stood_ns - self.first_ns) / _NS_PER_S

    @property
    def length_s(self) -> float:
        """For how long all stood."""
        return self.length_ns / _NS_PER_S


def read_pauses(ordered: Sequence[Event]) -> tuple[PauseRecord, ...]:
    """From a run's events, sorted by time."""
    reader = _Reader()
    for event in ordered:
        reader.take(event)
    if ordered:
        reader.stop_standing(ordered[-1].time_ns)
    return tuple(reader.found)


class _Reader:
    """``found``: the last one is under way if ``_open``. A repaired fault changes nothing: the ranks still stand."""

    def __init__(self) -> None:
        self.found: list[PauseRecord] = []
        self._open = False
        self._since_ns: int | None = None

    def take(self, event: Event) -> None:
        match event.kind:
            case "pause_asked":
                self._asked(event)
            case "pausing" if self._open and self._pause.first_ns is None:
                self._pause.first_ns = event.time_ns
            case "paused":
                self._stands(event)
            case "pause_withdrawn" if self._open and self._pause.stood_ns is None:
                self._close(event, PauseOutcome.WITHDRAWN)
            case "resumed" if self._since_ns is not None:
                self._close(event, PauseOutcome.RESUMED)
            case "leaving" if self._since_ns is not None:
                self._close(event, PauseOutcome.JOB_ENDED)
            case kind if kind in _ENDS and self._open:
                reached = self._pause.stood_ns is not None
                self._close(event, PauseOutcome.JOB_ENDED if reached else PauseOutcome.NOT_REACHED)
            case _ if self._since_ns is not None:
                self._inside(event)

    @property
    def _pause(self) -> PauseRecord:
        return self.found[-1]

    def _asked(self, event: Event) -> None:
        """An earlier step takes the place of a later one: that one was never reached."""
        if self._open:
            self._close(event, PauseOutcome.WITHDRAWN)
        by, step = text_of(event, "by") or "somebody", number_of(event, "at_step")
        self.found.append(PauseRecord(by=by, at_step=step, asked_ns=event.time_ns))
        self._open = True

    def _stands(self, event: Event) -> None:
        if not self._open:  # the wish is in none of the events: the file is torn
            self.found.append(PauseRecord(by="somebody", at_step=None, asked_ns=event.time_ns))
            self._open = True
        if self._pause.stood_ns is None:
            self._pause.stood_ns = event.time_ns
        self._pause.step = number_of(event, "step")
        if self._since_ns is None:
            self._since_ns = event.time_ns

    def _inside(self, event: Event) -> None:
        match event.kind:
            case "fault":
                lost = ", ".join(map(str, ranks_of(event, "lost")))
                self._pause.inside.append(f"recovery {event.generation}: {text_of(event, 'reason') or f'lost: {lost}'}")
            case "on_pause_failed":
                error = text_of(event, "error") or "unknown"
                self._pause.inside.append(f"rank {event.rank}: a function of session.on_pause has failed: {error}")
            case "saved":
                self._pause.inside.append(f"checkpoint of step {event.detail.get('step', '?')} written")
            case "restart_all":
                self._pause.inside.append(f"all ranks started again: {text_of(event, 'reason') or 'no reason given'}")
                self.stop_standing(event.time_ns)

    def stop_standing(self, time_ns: int) -> None:
        """From here on nobody stands."""
        if self._since_ns is not None:
            self._pause.length_ns += max(0, time_ns - self._since_ns)
            self._since_ns = None

    def _close(self, event: Event, outcome: PauseOutcome) -> None:
        self.stop_standing(event.time_ns)
        self._pause.outcome = outcome
        self._open = False
