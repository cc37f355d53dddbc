"""What an accelerator must be told in a recovery; a CPU needs to be told nothing.

The verbs of a recovery come in one order: ``stop``, ``check``, ``restart``, and where memory was lost ``mark_safe``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Accelerator(Protocol):
    """The device of one rank. Every verb raises DeviceError where the device does not do what it is told."""

    @property
    def stopped(self) -> bool:
        """Between ``stop`` and ``restart``: nothing can be computed."""
        ...

    @property
    def repairs_memory(self) -> bool:
        """Whether ``restart`` makes damaged addresses usable again. If not, what lay there must get new memory."""
        ...

    def synchronize(self) -> None:
        """Waits until all that the device was given is done: what ``stop`` finds under way is lost. It is not lent
        any more then.

        Raises what an operation has failed with, as it comes; RuntimeError if the device was cut meanwhile.
        """
        ...

    def lend(self) -> None:
        """From now on, until ``synchronize`` or ``take_back``, ``cut`` may stop the device."""
        ...

    def cut(self) -> int:
        """Stops the device if it is lent: a thread that waits for it gets an error. On any thread.

        Returns how many devices were stopped: 0 or 1.
        """
        ...

    def take_back(self) -> None:
        """The training thread goes on, outside of what may be cut: if the device was, it computes again."""
        ...

    def kind_of(self, error: BaseException) -> str:
        """What an exception means that an operation on the device has raised: a kind of finding, as of the probes.

        Empty: it is not the device's.
        """
        ...

    def stop(self) -> None:
        """Ends whatever the device is doing. Nothing, if it is stopped already."""
        ...

    def check(self, *, reported: bool) -> bool:
        """With the device stopped: whether memory that outlives the step has lost its content.

        ``reported``: this rank was told of damaged addresses since the last check.
        """
        ...

    def restart(self, groups: Sequence[Any], *, replaced: bool) -> None:
        """The device computes again, and its communicators work.

        ``groups`` are the process groups beside the default one that hold communicators; ``replaced``: one of the peers
        is a new process, so connections must be made anew.
        """
        ...

    def random_state(self) -> Any:
        """The state of the device's own generator, as a tensor of bytes on the host; None: it has none."""
        ...

    def restore_random_state(self, state: Any) -> None:
        """The inverse. ``state`` may be another process's."""
        ...

    def mark_safe(self, tensors: Iterable[Any]) -> None:
        """These tensors are about to get their content back: they may be used although ``check`` found damage."""
        ...


class Host:
    """No accelerator: nothing outlives the host's own operations, so there is nothing to stop."""

    stopped = False
    repairs_memory = False

    def synchronize(self) -> None:
        """The host's operations are done when they return."""

    def lend(self) -> None:
        """Nothing waits for a device."""

    def cut(self) -> int:
        """Nobody waits for it."""
        return 0

    def take_back(self) -> None:
        """Nothing was stopped."""

    def kind_of(self, error: BaseException) -> str:  # noqa: ARG002 - the protocol's
        """What fails on the host is the program's own."""
        return ""

    def stop(self) -> None:
        """Nothing to stop."""

    def check(self, *, reported: bool) -> bool:  # noqa: ARG002 - the protocol's
        """Knows of nothing."""
        return False

    def restart(self, groups: Sequence[Any], *, replaced: bool) -> None:
        """Nothing was stopped."""

    def random_state(self) -> None:
        """The host's are others, and those of CUDA devices torch knows."""

    def restore_random_state(self, state: Any) -> None:
        """It is of a device that is not here."""

    def mark_safe(self, tensors: Iterable[Any]) -> None:
        """Nothing was marked."""
