"""How a fault reaches the training thread when that thread is not blocked in a collective.

The native watchdog sends ``SIGURG`` to the main thread (a signal that does nothing where nobody asked for it); the
handler below runs there, between two bytecodes, and raises ``TrainingInterrupted`` if the body of a step is running.
Arming, disarming and the handler all run in the main thread, so they need no lock.

Three rules keep the exception inside the ``with`` block, and whole what the user has to clear up:

* It is not raised while a frame of the Session is on top: between ``__enter__`` arming and the body's first
  instruction, and between the body's last and ``__exit__`` disarming, there is nothing else.
* It is not raised inside a finalizer, where Python would print and forget it, nor inside an ``__exit__``, which would
  be left half done. In both cases the watchdog signals again.
* What arrives disarmed is not lost: whoever arms, or ends a step, looks at the stop word.

What does not work (measured, ``docs/facts.md``): ``PyThreadState_SetAsyncExc`` leaves sleeps, locks and queues asleep.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from resilient_train._native import Watchdog
from resilient_train.errors import TrainingInterrupted

SIGNAL = signal.SIGURG
STACKS_SIGNAL = signal.SIGRTMIN + 4
"""Asks a rank for its Python stacks, see ``session/pulse.py``."""
_SHELTERED = frozenset({"__del__", "__exit__", "__aexit__"})
_OURS = ("resilient_train.session", "resilient_train.frameworks", "resilient_train.interrupt")


class Interrupt:
    """The main thread's side. ``available`` is False when the Session runs in another thread: Python runs signal
    handlers only in the main one, so such a loop notices a fault at its next collective or step.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._armed = False
        self.available = threading.current_thread() is threading.main_thread()
        self._previous: Any = None

    def install(self) -> None:
        """Takes the signal; a handler that the user had set still runs."""
        if self.available:
            self._previous = signal.signal(SIGNAL, self._on_signal)

    def remove(self) -> None:
        """Gives the signal back. Idempotent."""
        if self.available and self._previous is not None:
            signal.signal(SIGNAL, self._previous)
            self._previous = None

    def arm(self, generation: int) -> None:
        """From now on a stop newer than ``generation`` interrupts this thread."""
        if self.available:
            self._armed = True
            self._watchdog.arm(generation)

    def disarm(self) -> None:
        """From now on nothing interrupts this thread."""
        self._armed = False
        self._watchdog.disarm()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if callable(self._previous):
            self._previous(signum, frame)
        if not self._armed or _must_not_be_cut(frame):
            return
        self.disarm()
        raise TrainingInterrupted


def _must_not_be_cut(frame: FrameType | None) -> bool:
    """Whether an exception raised now would land in our own code, or where it does harm or is lost."""
    if frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        return True
    while frame is not None:
        if frame.f_code.co_name in _SHELTERED:
            return True
        frame = frame.f_back
    return False
