"""What the Session does about errors of this rank's device: asks what was lost, tells the agent and the events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilient_train.frameworks.base import Framework
from resilient_train.session.link import Link
from resilient_train.session.recovery import Recovery


class Device:
    """``mends``: whether memory that lost data may be fetched from a replica (the ``UCE`` switch)."""

    def __init__(
        self,
        link: Link,
        engine: Framework,
        recovery: Recovery,
        tell: Callable[[str, dict[str, Any]], None],
        *,
        mends: bool,
    ) -> None:
        self._link = link
        self._engine = engine
        self._recovery = recovery
        self._tell = tell
        self._mends = mends

    def hear_alarms(self) -> None:
        """The device may be why all were stopped: then this rank joins as one whose memory was damaged.

        Not for the tail, where what was lost can't be put back: there the alarm stays for the recovery after this one.
        """
        alarms = self._link.board.alarms(self._link.rank)
        self._ask(wait=any(kind == "UCE" for _, kind in alarms))

    def lost_memory(self) -> bool:
        """An operation failed: whether that is because memory lost data."""
        return self._ask(wait=True)

    def _ask(self, *, wait: bool) -> bool:
        self._link.board.clear_alarms(self._link.rank)
        ranges = self._engine.device_errors(wait=wait) if self._mends else []
        self.tell()
        if ranges:
            self._tell("uce", self._recovery.lose_memory(ranges))
        return bool(ranges)

    def tell(self) -> None:
        """Writes what the device's libraries have said into the run's events."""
        for note in self._engine.device_notes():
            self._tell("device", note)
