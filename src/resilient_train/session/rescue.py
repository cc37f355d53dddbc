"""Frees a training thread that a collective has swallowed.

Closing a group's sockets ends nearly every collective within 2 ms, a signal nearly everything else. What neither
reaches (see ``frameworks/torch/escape.py``) is let go by this thread, which sleeps in the kernel until a stop is
raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from resilient_train._native import Board

_GRACE_S = 0.1
_WAKE_MS = 100


class Rescue:
    """Watches one rank's board. ``arrived(generation)`` says whether the training thread has noticed that stop."""

    def __init__(
        self, board: Board, generation: int, arrived: Callable[[int], bool], release: Callable[[], int]
    ) -> None:
        self._board = board
        self._generation = generation
        self._arrived = arrived
        self._release = release
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rt-rescue", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. A thread that came back from the kernel while the interpreter goes down would abort it."""
        self._closing = True
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            try:
                if not self._board.wait_stop(self._generation, _WAKE_MS):
                    continue
                generation = self._board.stop_generation
            except ValueError:  # the board was closed: the Session is over
                return
            while not self._closing and not self._arrived(generation):
                time.sleep(_GRACE_S)
                if not self._arrived(generation):
                    self._release()
            self._generation = generation
