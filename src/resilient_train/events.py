"""One Event is one line of ``events.jsonl``; every report, trace and metric is made from these lines alone."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from resilient_train.odd_text import escaped

AGENT = -1
"""The ``rank`` of an Event that an agent (not a rank) wrote."""


class Event(msgspec.Struct, omit_defaults=True, frozen=True):
    """Something that happened, as it is written to ``events.jsonl``.

    ``time_ns`` is wall-clock nanoseconds; ``rank`` is -1 for the agent; ``step`` is the loop's step number, -1 where
    none applies; ``duration_ns`` makes the event a span that *ended* at ``time_ns``.
    """

    kind: str
    time_ns: int
    rank: int = AGENT
    incarnation: int = 0
    generation: int = 0
    step: int = -1
    phase: str = ""
    duration_ns: int = 0
    detail: dict[str, Any] = {}


def now(kind: str, **fields: Any) -> Event:
    """An Event of this instant."""
    return Event(kind=kind, time_ns=time.time_ns(), **fields)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)
_BEGIN = b'{"kind":'


def to_line(event: Event) -> bytes:
    """The event as one JSON line, newline included."""
    try:
        return _encoder.encode(event) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(escaped(event)) + b"\n"


def from_line(line: bytes) -> Event:
    """The event of one JSON line. Raises ``msgspec.ValidationError`` or ``DecodeError`` if it isn't one."""
    return _decoder.decode(line)


def event_in(line: bytes) -> Event | None:
    """The event that ``line`` is, or ends with: a full disk cuts a line, and the next one follows it. None: neither."""
    begin = 0
    while begin >= 0:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            return from_line(line[begin:])
        begin = line.find(_BEGIN, begin + 1)
    return None
