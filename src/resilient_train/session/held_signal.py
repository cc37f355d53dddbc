"""SIGCHLD while ranks recover.

torch's handler raises in the training thread if a worker of a loader was killed, and that costs the rank
(``fail_stop.py``). It waits until all ranks go on: the others may need what this one holds, and nobody else.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class HeldChildSignal:
    """Of one process. What is no function (``SIG_DFL``) is not held."""

    def __init__(self) -> None:
        self._held: _Held | None = None

    def hold(self) -> None:
        """From now on the handler does not run; idempotent."""
        handler = signal.getsignal(signal.SIGCHLD)
        if self._held is None and callable(handler) and threading.current_thread() is threading.main_thread():
            self._held = _Held(handler)
            signal.signal(signal.SIGCHLD, self._held)

    def let(self) -> None:
        """It runs again, and now if it would have run since; it may raise."""
        came = self._held is not None and self._held.came
        self.end()
        if came:
            signal.raise_signal(signal.SIGCHLD)

    def end(self) -> None:
        """It runs again, when next a signal comes; idempotent."""
        held, self._held = self._held, None
        if held is not None:
            held.end()


class _Held:
    """In the handler's place. Another one may have been set around this: then it stands for the handler for good."""

    def __init__(self, handler: signal._HANDLER) -> None:
        self.handler = handler
        self.came = self.over = False

    def end(self) -> None:
        self.over = True
        current: object = signal.getsignal(signal.SIGCHLD)
        if current is self:
            signal.signal(signal.SIGCHLD, self.handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.over:
            self.came = True
        elif callable(self.handler):
            self.handler(number, frame)
