"""How a fault elsewhere reaches this rank's training thread, whatever it is at; and a SIGTERM the agent.

The watchdog (native) shuts the sockets that the thread may wait on, and signals it; ``Interrupt`` raises in the body
of a step. Closing a group's sockets ends nearly every collective within 2 ms, a signal nearly everything else. What
neither reaches (see ``communication/guarded_works.py``) is let go by a thread that sleeps in the kernel until a
stop is raised. That thread also sees when the agent asks for a report of this rank's collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from resilient_train._native import leave_terminate
from resilient_train.config import Settings
from resilient_train.interrupt import SIGNAL, Interrupt
from resilient_train.session.collective_report import CollectiveReport
from resilient_train.session.peers import Peers

_LOOK_S, _GRACE_S = 0.004, 0.1
"""Behind a stop a waiter may still be woken, by what it waits for, for so long."""
_WAKE_MS = 100


class StopDelivery:
    """``interrupt`` is armed while a body runs. ``waiters``: see ``roles.Groups``. At first only those are let go whom
    nobody will wake.
    """

    def __init__(
        self,
        peers: Peers,
        generation: int,
        waiters: Callable[[], Callable[[bool], int]],
        report: CollectiveReport,
        settings: Settings,
    ) -> None:
        self._peers = peers
        self._report = report
        self._generation = self._noticed = generation
        self._waiters = waiters
        self._watchdog = peers.watchdog(beat_ms=settings.beat_ms, grace_ms=settings.grace_ms, signal_number=int(SIGNAL))
        self.guard_sockets = self._watchdog.guard_sockets
        self.interrupt = Interrupt(self._watchdog)
        self._closing = False
        self._thread = threading.Thread(target=self._let_go, name="rt-rescue", daemon=True)

    def start(self) -> None:
        """The rank takes part from now on. A handler that the script has for SIGTERM or SIGUSR1 stays."""
        self._watchdog.start(self._generation)
        self._thread.start()
        self.interrupt.install()
        self._peers.hear_terminate()

    def notice(self, generation: int) -> None:
        """The training thread has noticed this stop."""
        self._noticed = generation
        self.interrupt.disarm()
        self._watchdog.acknowledge(generation)

    def close(self) -> None:
        """Gives the signals back and ends the threads. Idempotent."""
        try:
            self.interrupt.disarm()
            self.interrupt.remove()
        finally:
            leave_terminate()
            self._end_threads()

    def _end_threads(self) -> None:
        # A thread that came back from the kernel while the interpreter goes down would abort it.
        self._closing = True
        if self._thread.is_alive():
            self._thread.join()
        self._report.close()
        self._watchdog.stop()

    def _let_go(self) -> None:
        generation = self._generation
        while not self._closing:
            try:
                self._report.look()
                if not self._peers.wait_stop(generation, _WAKE_MS):
                    continue
                generation = self._peers.stop_generation
            except ValueError:  # the board was closed: the Session is over
                return
            late_s, pause_s = time.monotonic() + _GRACE_S, _LOOK_S
            while not self._closing and self._noticed < generation:
                time.sleep(pause_s)
                early, let_go = time.monotonic() < late_s, self._waiters()
                if self._noticed < generation:  # asked behind it: who notices just now is not in groups that come later
                    let_go(early)
                pause_s = _LOOK_S if early else _GRACE_S
