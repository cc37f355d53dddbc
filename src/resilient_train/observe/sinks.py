"""Where Events go. One line of ``events.jsonl`` per Event; all processes of a run append to the same file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

import msgspec

from resilient_train.events import Event, from_line, to_line

EVENTS_FILE = "events.jsonl"


class Sink(Protocol):
    """Anything that takes Events."""

    def write(self, event: Event) -> None:
        """Takes one event; must not block for long, it may be called in the middle of a recovery."""
        ...


class JsonLines:
    """Appends to ``events.jsonl``. One ``write(2)`` per line with ``O_APPEND``: lines of several processes don't mix.

    A full disk must not end a training run: the first failure to write is said on stderr, later ones are counted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: Event) -> None:
        """Appends one line."""
        try:
            os.write(self._descriptor, to_line(event))
        except OSError as error:
            self.dropped += 1
            if self.dropped == 1:
                os.write(2, f"resilient_train: events can't be written to {self.path}: {error}\n".encode())

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Discard:
    """A sink for a Session without an agent: there is no run directory to write to."""

    def write(self, event: Event) -> None:
        """Drops the event."""


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a file in the order of their times. Lines that are no Event (a torn last one) are left out.

    Raises FileNotFoundError if there is no such file.
    """
    events = []
    for line in Path(path).read_bytes().splitlines():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            events.append(from_line(line))
    return sorted(events, key=lambda event: event.time_ns)
