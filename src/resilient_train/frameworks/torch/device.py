"""The device of this rank: who must be told of a recovery, and where the addresses of damaged memory come from.

Those are the device's own list, and injection.

On an Ascend device (or its look-alike) the native probes poll ``aclrtGetMemUceInfo``. The operation that fails is in
the training thread and comes first, so ``take`` waits for the next look at the device before it says that there is
nothing.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Sequence

import torch

from resilient_train._native import Probes, ProbeStatus
from resilient_train.frameworks.accelerator import Accelerator, Host
from resilient_train.frameworks.torch.damage import InjectedErrors
from resilient_train.frameworks.torch_npu.device import NpuDevice
from resilient_train.state.transfer import Span

_ACL = "libascendcl.so"
_POLL_MS = 50
_WAIT_S = 1.0
_LOOKING = ("waiting", "opening", "polling")
_REPAIR_LIMIT_MS = 5000


class MemoryErrors:
    """The damaged ranges of this rank's device. ``library`` names an ACL runtime; empty: that of torch_npu, if used."""

    def __init__(self, library: str) -> None:
        self._injected = InjectedErrors()
        self._probes: Probes | None = None
        self._library = library or (_ACL if "torch_npu" in sys.modules else "")
        self.unchecked = False
        """The device has reported ranges since somebody last set this to False. Injected ones it knows nothing of."""

    def start(self) -> None:
        """Begins to look, where there is a device to look at."""
        if self._library:
            self._probes = Probes(hccl="", acl=self._library, nccl="", nvml="", device=_device(), poll_ms=_POLL_MS)
            self._probes.start()

    def stop(self) -> None:
        """Idempotent."""
        probes, self._probes = self._probes, None
        if probes is not None:
            probes.stop()

    def poison(self, tensor: torch.Tensor) -> None:
        """Destroys the tensor's bytes and reports them, in the device's place."""
        self._injected.poison(tensor)

    def take(self) -> list[Span]:
        """The ranges reported since the last call."""
        return self._injected.take() or self._look()

    def _look(self) -> list[Span]:
        probes = self._probes
        if probes is None:
            return []
        deadline = time.monotonic() + _WAIT_S
        begun = _status(probes).polls
        while True:
            found = [Span(*pair) for each in probes.take() if each.kind == "UCE" for pair in each.ranges]
            status = _status(probes)
            # The first look that ends may have begun before the operation failed.
            over = status.polls >= begun + 2 or status.state not in _LOOKING or time.monotonic() > deadline
            if found or over:
                self.unchecked = self.unchecked or bool(found)
                return found
            select.select([probes.fd], [], [], _POLL_MS / 1000)

    def repair(self, ranges: Sequence[Span]) -> None:
        """Tells the device that the content of these ranges is given up (``aclrtMemUceRepair``)."""
        if self._probes is not None and ranges:
            self._probes.repair_memory([(span.address, span.size) for span in ranges], _REPAIR_LIMIT_MS)
            self._probes.rearm()


def accelerator(rank: int) -> Accelerator:
    """The accelerator that this process computes on. Raises ConfigError if its runtime lacks what a recovery needs."""
    torch_npu = sys.modules.get("torch_npu")
    # `import torch` also loads the torch_npu of jobs that stay on the CPU; asking it for a device would start one.
    if torch_npu is None or not torch_npu.npu.is_initialized():
        return Host()
    return NpuDevice(torch_npu, rank)


def _status(probes: Probes) -> ProbeStatus:
    (acl,) = (each for each in probes.status() if each.name == "acl")
    return acl


def _device() -> int:
    torch_npu = sys.modules.get("torch_npu")
    return int(torch_npu.npu.current_device()) if torch_npu is not None else 0
