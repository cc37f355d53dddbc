"""What a Session does about errors of this rank's device: asks what was lost, tells the agent and the events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilient_train.errors import DeviceError
from resilient_train.frameworks.roles import Damage, Device
from resilient_train.session.peers import Peers


class DeviceErrors:
    """``mends``: whether memory that lost data may be fetched from a replica (the ``UCE`` switch). ``tell`` writes an
    event of this rank.
    """

    def __init__(
        self, peers: Peers, device: Device, tell: Callable[[str, dict[str, Any]], None], *, mends: bool
    ) -> None:
        self._peers = peers
        self._device = device
        self._tell = tell
        self._mends = mends

    def heard(self) -> Damage | None:
        """What was lost, if the device has raised an alarm: it may be why all were stopped."""
        return self.asked(wait=any(kind == "UCE" for _, kind in self._peers.alarms()))

    def asked(self, *, wait: bool) -> Damage | None:
        """What was lost since the last time; None: nothing. ``wait``: there is reason to expect some."""
        self._peers.clear_alarms()
        ranges = self._device.errors(wait=wait) if self._mends else []
        self.tell()
        if not ranges:
            return None
        damage = self._device.assess(ranges)
        self._tell("uce", {"ranges": [list(span) for span in ranges], "tensors": damage.names()})
        return damage

    def kind_of(self, error: BaseException) -> str:
        """See ``roles.Device``. A memory error that nobody is to mend is the script's."""
        kind = self._device.kind_of(error)
        return "" if kind == "UCE" and not self._mends else kind

    def is_of_one(self, error: BaseException) -> bool:
        """Whether it may be this device's alone. A group's all its ranks may raise at once: nobody is left then."""
        return self.kind_of(error) in ("", "UCE", "DEVICE")

    def failed(self, what: str) -> DeviceError:
        """For an error that this process can't be rid of."""
        return DeviceError(
            f"rank {self._peers.rank}: its device failed where nothing but a new process repairs that: {what}; this "
            "process ends so that it is replaced"
        )

    def check_after_update(self, error: BaseException) -> None:
        """There a step can't be left (decision 12). Raises DeviceError if memory lost data, or the error is its own."""
        ranges = self._device.errors(wait=True) if self._mends else []
        if ranges:
            raise DeviceError(
                f"rank {self._peers.rank}: {sum(each.size for each in ranges)} bytes of its device's memory lost data "
                "after the update, where a step can't be left; this process ends so that it is replaced"
            )
        if self.kind_of(error):
            raise self.failed(f"{type(error).__name__}: {error}")

    def suspected(self) -> bool:
        """Whether the device says that memory lost data, also where nobody is to mend it: nothing is whole then."""
        alarmed = any(kind == "UCE" for _, kind in self._peers.alarms())
        return alarmed or bool(self._device.errors(wait=True))

    def confirmed(self, damage: Damage) -> Damage:
        """After the groups were closed: the damage, as far as the stopped device knows of more than ``damage``.

        Raises DeviceError where the device can't be repaired.
        """
        found = self._device.confirm(damage)
        if found is not damage:
            self._tell("uce", {"ranges": [], "tensors": found.names()})
        return found

    def tell(self) -> None:
        """Writes what the device's libraries have said into the run's events."""
        for note in self._device.notes():
            self._tell("device", note)
