"""How a fault reaches the training thread when that thread is not blocked in a collective.

The native watchdog sends ``SIGURG`` to the main thread (a signal that does nothing where nobody asked for it); the
handler below runs there, between two bytecodes, and raises ``TrainingInterrupted`` if the body of a step is running.
Arming, disarming and the handler all run in the main thread, so they need no lock.

Five rules keep the exception inside the ``with`` block, and whole what the user can't clear up. In all but the last
case the watchdog signals again, until the stop is acknowledged:

* It is not raised while a frame of this library's is on top: between ``__enter__`` arming and the body's first
  instruction, and between the body's last and ``__exit__`` disarming, there is nothing else.
* It is not raised inside a finalizer, where Python would print and forget it; nor inside an ``__enter__`` or
  ``__exit__``, which would leave a lock taken or ``torch.no_grad`` half entered; nor inside an import or a log call;
  nor inside what torch makes at the first use: ``_lazy_init`` says first that it was there, and is not run again; nor
  inside a fault on request, which would be struck off the plan and not carried out.
* It is not raised in the standard library's locks and queues but where they wait: a ``Condition`` cut elsewhere gives
  back a lock that it does not have, or leaves a waiter that swallows a wake-up.
* It is not raised while another such signal is being looked at: it would leave in the place of that one's answer.
* What arrives disarmed is not lost: whoever arms, or ends a step, looks at the stop word.

What does not work (measured, ``docs/facts.md``): ``PyThreadState_SetAsyncExc`` leaves sleeps, locks and queues asleep.
"""

from __future__ import annotations

import dis
import inspect
import signal
import threading
from types import CodeType, FrameType
from typing import Any

from resilient_train._native import Watchdog
from resilient_train.errors import TrainingInterrupted

SIGNAL = signal.SIGURG
STACKS_SIGNAL = signal.SIGRTMIN + 4
"""Asks a rank for its Python stacks, see ``session/liveness.py``."""
_OURS = "resilient_train."
_BODIES_OF_OURS = ("resilient_train.demo", "resilient_train.testing")
_WHOLE_CALLS = frozenset({"__del__", "__enter__", "__exit__", "__aenter__", "__aexit__", "_lazy_init"})
_WHOLE_MODULES = ("importlib._bootstrap", "logging", "resilient_train.session.injection")
_LOCKING_MODULES = ("threading", "queue", "multiprocessing.", "concurrent.futures.")
_WAITS = frozenset({"Condition.wait", "Thread._wait_for_tstate_lock"})
"""The waits that clear up behind themselves when they are cut in ``lock.acquire()``, and there only."""


class Interrupt:
    """The main thread's side. ``available`` is False when the loop runs in another thread: Python runs signal
    handlers only in the main one, so such a loop notices a fault at its next collective or step.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self.armed = False
        """Whether there is something to disarm."""
        self.available = False
        self._previous: Any = None
        self._beneath = 0
        self._raised = False
        """The body that runs was interrupted, unless somebody has caught it: see ``insist``."""

    def install(self) -> None:
        """Takes the signal; a handler that the user had set still runs. To be called by the loop's thread."""
        self.available = threading.current_thread() is threading.main_thread()
        if self.available:
            self._beneath = _whole_calls(inspect.currentframe())  # a loop that runs in an import must be interruptible
            self._previous = signal.signal(SIGNAL, self._on_signal)

    def remove(self) -> None:
        """Gives the signal back. Idempotent."""
        if self.available and self._previous is not None:
            signal.signal(SIGNAL, self._previous)
            self._previous = None

    def arm(self, generation: int) -> None:
        """From now on a stop newer than ``generation`` interrupts this thread."""
        if self.available:
            self.armed = True
            self._raised = False
            self._watchdog.arm(generation)

    def insist(self) -> None:
        """Interrupts the body again if it was, and goes on all the same: a ``return`` in a ``finally`` or a bare
        ``except:`` swallows an exception, and Python itself drops those in a finalizer. What was cut is half done, and
        must not become an update.
        """
        if self._raised:
            raise TrainingInterrupted

    def disarm(self) -> None:
        """From now on nothing interrupts this thread."""
        self.armed = False
        self._watchdog.disarm()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if callable(self._previous):
            self._previous(signum, frame)
        if not self.armed or frame is None or self._is_looking(frame):
            return
        if _on_top_unsafe(frame) or _whole_calls(frame) > self._beneath:
            return
        self.disarm()
        self._raised = True
        raise TrainingInterrupted

    def _is_looking(self, frame: FrameType | None) -> bool:
        """Whether a signal before this one has not been answered yet. A flag would be set a bytecode too late."""
        code = self._on_signal.__code__
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return frame is not None


def _on_top_unsafe(frame: FrameType) -> bool:
    """Whether an exception raised now would land in our own code, or in the middle of a lock's or a queue's."""
    module = frame.f_globals.get("__name__", "")
    if module.startswith(_OURS):
        return not module.startswith(_BODIES_OF_OURS)
    if not module.startswith(_LOCKING_MODULES):
        return False
    return frame.f_code.co_qualname not in _WAITS or _last_attribute(frame.f_code, frame.f_lasti) != "acquire"


def _whole_calls(frame: FrameType | None) -> int:
    """How many calls on the stack have to run to their end once begun."""
    count = 0
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        count += frame.f_code.co_name in _WHOLE_CALLS or module.startswith(_WHOLE_MODULES)
        frame = frame.f_back
    return count


def _last_attribute(code: CodeType, offset: int) -> str:
    """Name of the attribute that was loaded last before ``offset``: the method that is being called there."""
    name = ""
    for instruction in dis.get_instructions(code):
        if instruction.offset > offset:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = instruction.argval
    return name
