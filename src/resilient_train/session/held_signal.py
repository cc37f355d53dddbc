"""SIGCHLD while ranks recover.

torch's handler raises in the training thread if a worker of a loader was killed, and that costs the rank
(``fail_stop.py``). It waits until all ranks go on: the others may need what this one holds, and nobody else.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class HeldChildSignal:
    """Of one process. What is no function (``SIG_DFL``) is not held."""

    def __init__(self) -> None:
        self._holds = self._came = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def hold(self) -> None:
        """From now on the handler does not run; idempotent."""
        handler = signal.getsignal(signal.SIGCHLD)
        if self._holds or not callable(handler) or threading.current_thread() is not threading.main_thread():
            return
        self._holds = True
        if handler != self._heard:
            self._handler = handler
            signal.signal(signal.SIGCHLD, self._heard)

    def let(self) -> None:
        """It runs again, and now if it would have run since; it may raise."""
        came = self._came
        self.end()
        if came:
            signal.raise_signal(signal.SIGCHLD)

    def end(self) -> None:
        """It runs again, when next a signal comes; idempotent."""
        if self._holds and signal.getsignal(signal.SIGCHLD) == self._heard:
            signal.signal(signal.SIGCHLD, self._handler)
        self._holds = self._came = False

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """Another handler may have been set around this one: then this stands for the former one."""
        if self._holds:
            self._came = True
        elif self._handler is not None:
            self._handler(number, frame)
