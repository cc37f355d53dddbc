"""What the controller tells the agent to do. Values, so that the simulation can carry them out as well."""

from __future__ import annotations

import msgspec

from resilient_train.protocol.messages import FromAgent


class RaiseStop(msgspec.Struct, frozen=True):
    """Raise the stop word of every board; the Stop frames follow as Send commands."""

    generation: int


class SetPause(msgspec.Struct, frozen=True):
    """Write into every board that all are to stop before ``step``, or at the next head behind it; -1: no more."""

    step: int


class Spawn(msgspec.Struct, frozen=True):
    """Start the process of ``rank``; kill what is left of its predecessor first."""

    rank: int
    incarnation: int
    joining: bool
    attempt: int


class Kill(msgspec.Struct, frozen=True):
    """SIGKILL the process of ``rank``; its death comes back as an event, which tells ``reason``."""

    rank: int
    reason: str


class Send(msgspec.Struct, frozen=True):
    """One frame to one rank; dropped if that rank has no connection."""

    rank: int
    message: FromAgent


class Note(msgspec.Struct, frozen=True):
    """Write an event."""

    kind: str
    rank: int = -1
    detail: dict[str, object] = {}


class KeepAnomalies(msgspec.Struct, frozen=True):
    """Write down that a step was anomalous, for a job that goes on from here: its value, each time that it ran."""

    what: str
    step: int
    values: tuple[float, ...]


class EndJob(msgspec.Struct, frozen=True):
    """Stop every rank and leave with this exit code."""

    code: int
    reason: str


Command = RaiseStop | SetPause | Spawn | Kill | Send | Note | KeepAnomalies | EndJob
