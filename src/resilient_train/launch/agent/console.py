"""Writing to the console without depending on it: it may be slow, stopped (Ctrl-S, a pager), or gone.

The agent has one thread. If a print blocked or raised in it, no rank would be recovered any more: a job whose
``| tee`` had been killed stood still for ever after its next fault.
"""

from __future__ import annotations

import os
import select
import time

_PIECE_BYTES = 4096
"""A pipe that polls as writable takes PIPE_BUF bytes without blocking (pipe(7))."""
_PENDING_MAX_BYTES = 1 << 20


class Console:
    """One descriptor. ``write`` never blocks and never raises; what does not fit goes out with a later call."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending = b""
        self._gone = False
        self._stopped = False
        """Its reader took nothing for as long as it was waited for."""
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def behind(self) -> bool:
        """Whether something waits to be written: better give it no more for now."""
        return bool(self._pending)

    def write(self, data: bytes) -> None:
        """Writes what goes now, and keeps the rest; beyond 1 MiB of rest, ``data`` is dropped."""
        if len(self._pending) < _PENDING_MAX_BYTES:
            self._pending += data
        self.flush()

    def say(self, text: str) -> None:
        """Writes a line of our own."""
        self.write(f"{text}\n".encode(errors="replace"))

    def flush(self) -> None:
        """Writes what goes now."""
        rest = memoryview(b"" if self._gone else self._pending)
        while rest and self._poll.poll(0):
            try:
                rest = rest[os.write(self._descriptor, rest[:_PIECE_BYTES]) :]
            except OSError:
                self._gone, rest = True, memoryview(b"")
        self._pending = bytes(rest)

    def drain(self, limit_s: float) -> None:
        """Waits a moment for a slow reader: afterwards nobody will write any more. Not again, if it takes nothing."""
        deadline = time.monotonic() + limit_s
        while self._pending and not self._stopped and (left_s := deadline - time.monotonic()) > 0:
            self._stopped = not self._poll.poll(left_s * 1000)
            self.flush()
