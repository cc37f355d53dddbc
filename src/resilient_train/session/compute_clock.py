"""How long the bodies of a window compute, for the agent's straggler watch: without what they wait for other ranks.

What is not in it: the batch that is waited for, snapshots, the barrier, the tail behind the update, and what stands
between two steps. The update is added natively, see ``Page.begin``.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class ComputeClock:
    """Runs while a body does. ``waited_ns``: how long this rank has waited for collectives so far.

    ``tell`` is told of each body, in nanoseconds.
    """

    def __init__(self, waited_ns: Callable[[], int], tell: Callable[[int], None]) -> None:
        self._waited_ns = waited_ns
        self._tell = tell
        self._begun_ns = 0
        """On a clock that stands while this rank waits; 0: no body runs."""
        self._slept_ns = self._last_ns = 0
        self._times = 1.0

    def start(self) -> None:
        """A body begins."""
        self._begun_ns = time.monotonic_ns() - self._waited_ns()
        if self._times > 1.0:
            self._lag()

    def stop(self) -> None:
        """It has ended, or an update begins. Idempotent."""
        if self._begun_ns:
            duration_ns = time.monotonic_ns() - self._waited_ns() - self._begun_ns
            self._begun_ns = 0
            self._last_ns = duration_ns - self._slept_ns
            self._tell(duration_ns)

    def slow_down(self, times: float) -> None:
        """A fault on request: from this body on they take so many times as long."""
        self._times = times
        self._lag()

    def _lag(self) -> None:
        begun_ns = time.monotonic_ns()
        time.sleep(max(0, self._last_ns) * (self._times - 1.0) / 1e9)
        self._slept_ns = time.monotonic_ns() - begun_ns
