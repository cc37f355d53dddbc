"""Signals that ask a job to end, and a thread that sees them where Python's handlers can't run.

A handler of Python's runs in the main thread, between two of its instructions: never while that sits in a native call,
a collective without its peer for example. The interpreter's C code writes each signal into a socket all the same.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """From ``__init__``, which is called in the main thread, to ``close`` signals end nothing.

    ``late`` is called in a thread of its own, ``grace_s`` after the first signal unless it was closed by then, and
    ``over`` likewise after ``limit_s``.
    """

    def __init__(
        self,
        late: Callable[[], None],
        grace_s: float,
        over: Callable[[], None],
        limit_s: float,
        signals: Iterable[signal.Signals] = SIGNALS,
    ) -> None:
        self.got: int | None = None
        """The first signal."""
        self._acts = ((grace_s, late), (limit_s - grace_s, over))
        self._closed = threading.Event()
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._theirs = theirs
        self._handlers = {each: signal.signal(each, self._handle) for each in signals}
        self._fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        _open.add(self)
        self._thread = threading.Thread(target=self._watch, name="resilient_train preemption", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Signals do again what they did before. Called in the main thread."""
        self._closed.set()
        self.forget()
        self._theirs.close()
        self._thread.join()
        self._ours.close()

    def forget(self) -> None:
        """As ``close``, for a fork, in which there is no thread, and whose signals are not the job's."""
        _open.discard(self)
        signal.set_wakeup_fd(self._fd)
        for each, handler in self._handlers.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)

    @property
    def signals(self) -> Iterable[int]:
        """Those that it takes."""
        return self._handlers.keys()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.got = self.got or number

    def _watch(self) -> None:
        while seen := self._ours.recv(64):
            if any(each in self._handlers for each in seen):
                for seconds, act in self._acts:
                    if self._closed.wait(seconds):
                        return
                    act()


_open: weakref.WeakSet[Preemption] = weakref.WeakSet()


_mask = threading.local()


def _before_fork() -> None:
    """No signal may reach the fork before it has forgotten."""
    taken = {number for each in _open for number in each.signals}
    _mask.old = signal.pthread_sigmask(signal.SIG_BLOCK, taken)


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.old)


def _in_fork() -> None:
    """MindSpore's data workers are forks, and are ended by SIGTERM."""
    for each in list(_open):
        each.forget()
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.old)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_fork)
