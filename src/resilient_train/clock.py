"""The one place where time comes from, so that the simulation can bring its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the agent asks of a clock."""

    def time_ns(self) -> int:
        """Wall-clock time in nanoseconds, comparable between the processes of one machine."""
        ...


class SystemClock:
    """``CLOCK_REALTIME``: the only clock whose values mean the same in every process and in the user's logs."""

    def time_ns(self) -> int:
        return time.time_ns()


SYSTEM = SystemClock()
