"""The device of this rank: see ``frameworks/roles.Device``; and who must be told of a recovery (``accelerator``).

On an Ascend device the native probes ask ACL for its last error and its list of damaged memory; on an NVIDIA GPU they
ask NVML. A finding sets the rank's alarm in the step record, so that the agent hears of it without this process's
Python. The operation that fails may come first, so ``errors`` can wait for the next look at the device before it says
that there is nothing.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from resilient_train._native import Finding, Probes, ProbeStatus
from resilient_train.config import Settings
from resilient_train.errors import ConfigError, DeviceError
from resilient_train.frameworks.accelerator import Accelerator, Host
from resilient_train.frameworks.roles import Damage
from resilient_train.frameworks.torch.communication.transports.nccl import NcclGroup
from resilient_train.frameworks.torch.cuda_device import CudaDevice
from resilient_train.frameworks.torch.groups import nccl_groups
from resilient_train.frameworks.torch.rank_state import TorchRankState
from resilient_train.frameworks.torch.state import TorchState
from resilient_train.frameworks.torch.tensors.damage import InjectedErrors, assess, move
from resilient_train.frameworks.torch_npu.device import NpuDevice
from resilient_train.state.transfer import Span

_ACL = "libascendcl.so"
_HCCL = "libhccl.so"
_NVML = "libnvidia-ml.so.1"
_NCCL = "libnccl.so.2"
_WAIT_S = 1.0
_LOOKING = ("waiting", "opening", "polling")
_REPAIR_LIMIT_MS = 5000


class TorchDevice:
    """Asks for errors only where there is a device to ask; else it has no thread."""

    def __init__(
        self,
        settings: Settings,
        accelerator: Accelerator,
        state: TorchState,
        rank_state: TorchRankState,
        communicators: Callable[[int], list[int]],
    ) -> None:
        """``communicators``: HCCL's that there are by now; they are asked for errors where RESILIENT_HCCL is on."""
        self._accelerator = accelerator
        self.synchronize = accelerator.synchronize  # twice a step: one call less
        self.lend, self.take_back, self.kind_of = accelerator.lend, accelerator.take_back, accelerator.kind_of
        self._state = state
        self._rank_state = rank_state
        self._injected = InjectedErrors()
        self._probes: Probes | None = None
        self._acl = settings.acl_library or (_ACL if _npu() is not None else "")
        self._nvml = settings.nvml_library or (_NVML if _uses_cuda() else "")
        self._hccl = (settings.hccl_library or _HCCL) if settings.hccl and _npu() is not None else ""
        self._nccl = _NCCL if isinstance(accelerator, CudaDevice) else ""
        self._communicators = communicators
        self._watched: dict[int, None] = {}
        self._poll_ms = settings.probe_ms
        self._notes: list[dict[str, Any]] = []
        self._unchecked = False
        """The device has reported ranges since the last ``confirm``. Injected ones it knows nothing of."""

    def watch(self, alarm: Callable[[Probes], None]) -> None:
        if not self._acl and not self._nvml:
            return
        device, uuid = _device()
        probes = Probes(
            hccl=self._hccl,
            nccl=self._nccl,
            acl=self._acl,
            nvml=self._nvml,
            device=device,
            uuid=uuid,
            poll_ms=self._poll_ms,
        )
        alarm(probes)
        probes.start()
        self._probes, self._number = probes, device
        if self._nccl:
            NcclGroup.probes = probes
        if self._hccl:
            self.synchronize = self._synchronize_and_hand_in

    def close(self) -> None:
        probes, self._probes = self._probes, None
        NcclGroup.probes = None
        if probes is not None:
            self._keep(probes.take())
            probes.stop()

    def _synchronize_and_hand_in(self) -> None:
        """HCCL makes a communicator with its first collective: from then on the probe asks it for errors."""
        self._accelerator.synchronize()
        probes = self._probes
        if probes is None:
            return
        for each in self._communicators(self._number):
            if each not in self._watched:
                probes.add_comm("hccl", each)
                self._watched[each] = None

    def _take_out(self) -> None:
        """What a recovery suspends or frees is not asked."""
        while self._watched and self._probes is not None:
            comm, _ = self._watched.popitem()
            if not self._probes.remove_comm("hccl", comm):
                raise DeviceError(
                    f"HCCL was asked how communicator {comm:#x} is, and does not answer: it can't be suspended; this "
                    "process ends so that it is replaced"
                )

    def poison(self, tensor: torch.Tensor) -> None:
        """Destroys the tensor's bytes and reports them, in the device's place."""
        self._injected.poison(tensor)

    def errors(self, *, wait: bool) -> list[Span]:
        return self._injected.take() or self._look(wait=wait)

    def name(self) -> str:
        number, uuid = _device()
        return uuid or (f"npu:{number}" if _npu() is not None else "cpu")

    def notes(self) -> list[dict[str, Any]]:
        if self._probes is not None:
            self._keep(self._probes.take())
        notes, self._notes = self._notes, []
        return notes

    def assess(self, ranges: list[Span]) -> Damage:
        own = self._rank_state.buffers.changed()
        damage = assess(ranges, self._state.tensors(), own)
        if not self._accelerator.repairs_memory:
            self._repair(ranges)
            for name in damage.own:
                move(own[name])
        return damage

    def confirm(self, damage: Damage) -> Damage:
        self._take_out()
        if not self._accelerator.stopped:
            return damage
        persistent = self._accelerator.check(reported=self._unchecked)
        self._unchecked = False
        if damage.lost or not persistent:
            return damage
        # No tensor is known to be hit, and yet one is: the device did not say which, or it is not registered.
        everything = frozenset(self._state.tensors())
        return Damage(everything, tuple(self._rank_state.buffers.changed()), damage.elsewhere)

    def _keep(self, findings: Sequence[Finding]) -> None:
        self._notes += [{"kind": f.kind, "probe": f.probe, "code": f.code, "text": f.text} for f in findings]

    def _look(self, *, wait: bool) -> list[Span]:
        probes = self._probes
        if probes is None or not self._acl:
            return []
        deadline = time.monotonic() + _WAIT_S
        begun = _status(probes).polls
        while True:
            findings = probes.take()
            self._keep(findings)
            found = [Span(*pair) for each in findings if each.kind == "UCE" for pair in each.ranges]
            status = _status(probes)
            # The first look that ends may have begun before the operation failed.
            over = status.polls >= begun + 2 or status.state not in _LOOKING or time.monotonic() > deadline
            if found or over or not wait:
                self._unchecked = self._unchecked or bool(found)
                return found
            select.select([probes.fd], [], [], self._poll_ms / 1000)

    def _repair(self, ranges: Sequence[Span]) -> None:
        """Tells the device that the content of these ranges is given up (``aclrtMemUceRepair``)."""
        if self._probes is not None and self._acl and ranges:
            self._probes.repair_memory([(span.address, span.size) for span in ranges], _REPAIR_LIMIT_MS)
            self._probes.rearm()


def accelerator(rank: int, models: Sequence[torch.nn.Module]) -> Accelerator:
    """The accelerator that this process computes on. Raises ConfigError if its runtime lacks what a recovery needs."""
    if nccl_groups():
        # A script need not make its device the current one.
        there = sorted({each.device.index for model in models for each in model.parameters() if each.is_cuda})
        if len(there) > 1:
            raise ConfigError(
                f"model: its parameters lie on CUDA devices {', '.join(map(str, there))}, and what a fault cuts is "
                "known of one: keep the part of each rank on one device, or leave RESILIENT_NCCL out"
            )
        return CudaDevice(rank, there[0] if there else torch.cuda.current_device(), nccl_groups)
    torch_npu = _npu()
    return Host() if torch_npu is None else NpuDevice(torch_npu, rank)


def _npu() -> Any:
    """torch_npu, if this process computes with it; else None."""
    torch_npu = sys.modules.get("torch_npu")
    # `import torch` also loads the torch_npu of jobs that stay on the CPU; asking it for a device would start one.
    return torch_npu if torch_npu is not None and torch_npu.npu.is_initialized() else None


def _status(probes: Probes) -> ProbeStatus:
    (acl,) = (each for each in probes.status() if each.name == "acl")
    return acl


def _device() -> tuple[int, str]:
    """Number for ACL, and the GPU's UUID for NVML, which knows nothing of CUDA_VISIBLE_DEVICES."""
    torch_npu = _npu()
    if torch_npu is not None:
        return int(torch_npu.npu.current_device()), ""
    if _uses_cuda():
        device = torch.cuda.current_device()
        return device, f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return 0, ""


def _uses_cuda() -> bool:
    # Not is_available: that would set up a driver which this job may have no use for.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call] # torch has no types there
