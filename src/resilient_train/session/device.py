"""What the Session does about errors of this rank's device: asks what was lost, tells the agent and the events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilient_train.errors import DeviceError
from resilient_train.frameworks.base import Framework
from resilient_train.protocol.processor import Processor
from resilient_train.protocol.standing import Phase
from resilient_train.session.link import Link
from resilient_train.session.recovery import Recovery
from resilient_train.session.surrender import surrenders


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
        self.event = tell
        self._mends = mends

    def hear_alarms(self) -> None:
        """The device may be why all were stopped: then this rank joins as one whose memory was damaged.

        Not for the tail, where what was lost can't be put back: there the alarm stays for the recovery after this one.
        """
        alarms = self._link.board.alarms(self._link.rank)
        self._ask(wait=any(kind == "UCE" for _, kind in alarms))

    def explains(self, error: BaseException, processor: Processor) -> bool:
        """Whether a fault made the body raise this: an ordinary exception is the user's, unless a recovery is under
        way, memory lost data, or a peer has hung up.

        After the update it is: what a fault does to a collective there is repaired inside the call.
        """
        phase = processor.standing.phase
        if not isinstance(error, Exception):
            return False
        if phase is Phase.APPLIED:
            self._check_after_update()
            return False
        if phase is Phase.COMPUTE and self._link.stop_raised(processor.generation):
            return True  # and the device is not waited for
        return self._ask(wait=True) or (phase is Phase.COMPUTE and self._engine.groups_broken())

    @surrenders
    def _check_after_update(self) -> None:
        """There a step can't be left (decision 12): if memory lost data, this process ends and is replaced."""
        ranges = self._engine.device_errors(wait=True) if self._mends else []
        if ranges:
            raise DeviceError(
                f"rank {self._link.rank}: {sum(each.size for each in ranges)} bytes of its device's memory lost data "
                "after the update, where a step can't be left; this process ends so that it is replaced"
            )

    def _ask(self, *, wait: bool) -> bool:
        self._link.board.clear_alarms(self._link.rank)
        ranges = self._engine.device_errors(wait=wait) if self._mends else []
        self.tell()
        if ranges:
            self.event("uce", self._recovery.lose_memory(ranges))
        return bool(ranges)

    def tell(self) -> None:
        """Writes what the device's libraries have said into the run's events."""
        for note in self._engine.device_notes():
            self.event("device", note)
