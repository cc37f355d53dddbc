"""How a fault elsewhere reaches this rank's training thread, whatever it is at; and a SIGTERM the agent.

The watchdog (native) shuts the sockets that the thread may wait on, and signals it; ``Interrupt`` raises in the body of
a step; ``Rescue`` frees what gloo has forgotten.
"""

from __future__ import annotations

from resilient_train._native import Watchdog, hear_terminate, leave_terminate
from resilient_train.config import Settings
from resilient_train.frameworks.base import Framework
from resilient_train.interrupt import SIGNAL, Interrupt
from resilient_train.session.link import Link
from resilient_train.session.rescue import Rescue


class Guards:
    """``interrupt`` is armed while a body runs."""

    def __init__(self, link: Link, engine: Framework, settings: Settings) -> None:
        self._link = link
        self.watchdog = Watchdog(
            link.board,
            link.rank,
            beat_ms=settings.beat_ms,
            grace_ms=settings.grace_ms,
            signal_number=int(SIGNAL),
        )
        self.interrupt = Interrupt(self.watchdog)
        self._arrived = link.generation
        self._rescue = Rescue(link.board, link.generation, lambda g: self._arrived >= g, engine.release_waiters)

    def start(self) -> None:
        """The rank takes part from now on. A handler that the script has for SIGTERM or SIGUSR1 stays."""
        self.watchdog.start(self._link.generation)
        self._rescue.start()
        self.interrupt.install()
        hear_terminate(self._link.board, self._link.rank)

    def on_stop(self, generation: int) -> None:
        """The training thread has noticed this stop."""
        self._arrived = generation
        self.interrupt.disarm()
        self.watchdog.acknowledge(generation)

    def close(self) -> None:
        """Gives the signals back and ends the threads. Idempotent."""
        self.interrupt.disarm()
        self.interrupt.remove()
        leave_terminate()
        self._rescue.close()
        self.watchdog.stop()
