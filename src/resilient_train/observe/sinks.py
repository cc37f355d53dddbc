"""Where Events go. One line of ``events.jsonl`` per Event; all processes of a run append to the same file."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Protocol

from resilient_train.events import Event, event_in, to_line

EVENTS_FILE = "events.jsonl"


class Sink(Protocol):
    """Anything that takes Events."""

    def write(self, event: Event) -> None:
        """Takes one event; must not block for long, it may be called in the middle of a recovery."""
        ...


class JsonLines:
    """Appends to ``events.jsonl``. One ``write(2)`` per line with ``O_APPEND``: lines of several processes don't mix.

    Nothing that only tells may end a training run: where the file can't be opened or written (the disk is full, the
    folder was tidied away) that is said once on stderr, if that goes, and events are counted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._descriptor = -1
        self._why = ""
        try:
            self._descriptor = open_to_append(self.path)
        except OSError as error:
            self._why = str(error)

    def write(self, event: Event) -> None:
        """Appends one line."""
        why, line = self._why, to_line(event)
        try:
            if not why and os.write(self._descriptor, line) < len(line):
                why = "the disk is full; the last line is cut"
        except OSError as error:
            why = str(error)
        if why:
            self.dropped += 1
            if self.dropped == 1:
                say_aside(f"events can't be written to {self.path}: {why}")

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


ASIDE = "resilient_train: "
"""How each line of this package begins that a rank writes."""


def open_to_append(path: Path) -> int:
    """A descriptor of a file of this user's alone, at its end. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def say_aside(text: str) -> None:
    """A line on standard error, which may lie on a full disk, or be closed: then nobody hears it, and nothing ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"{ASIDE}{text}", file=sys.stderr, flush=True)


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a file in the order of their times. Lines that are no Event (a torn last one) are left out.

    Raises FileNotFoundError if there is no such file.
    """
    found = map(event_in, Path(path).read_bytes().splitlines())
    return sorted((event for event in found if event is not None), key=lambda event: event.time_ns)
