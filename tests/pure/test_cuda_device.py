"""A CUDA device of a rank: what an abort leaves of it, and which errors are a fault's."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is

from resilient_train.errors import ConfigError, DeviceError  # noqa: E402
from resilient_train.frameworks.torch import cuda_device  # noqa: E402
from resilient_train.frameworks.torch import device as device_module  # noqa: E402
from resilient_train.frameworks.torch.communication.transports.nccl import CUT, NcclGroup  # noqa: E402
from resilient_train.frameworks.torch.cuda_device import CudaDevice  # noqa: E402


class Machine:
    """What torch says of the device, and what was done to the groups."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.failure: Exception | None = None
        self.at_rest = threading.Event()
        self.at_rest.set()

    def synchronize(self, index: int) -> None:
        assert index == 2
        assert self.at_rest.wait(10)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "synchronize", machine.synchronize)
    monkeypatch.setattr(NcclGroup, "index", None)
    return machine


@pytest.fixture
def device(machine: Machine) -> CudaDevice:
    groups: Any = [
        SimpleNamespace(
            was_cut=False,
            abort_communicators=lambda name=name: machine.told.append(f"abort {name}"),
            hand_in=lambda name=name: machine.told.append(f"hand in {name}"),
        )
        for name in "ab"
    ]
    device = CudaDevice(1, 2, lambda: groups)
    assert NcclGroup.index == 2
    return device


def test_only_what_is_lent_is_cut(device: CudaDevice, machine: Machine) -> None:
    assert device.cut() == 0
    device.lend()
    device.take_back()
    assert device.cut() == 0
    device.lend()
    device.synchronize()
    assert device.cut() == 0
    assert machine.told == ["hand in a", "hand in b"]
    device.lend()
    assert device.cut() == 1
    assert device.cut() == 0
    assert machine.told[2:] == ["abort a", "abort b"]


def test_who_waited_for_a_device_that_was_cut_is_told(device: CudaDevice, machine: Machine) -> None:
    """To torch all looks as if it had come about."""
    device.lend()
    device.cut()
    with pytest.raises(RuntimeError, match=CUT) as caught:
        device.synchronize()
    assert device.kind_of(caught.value) == "STOPPED"
    assert "hand in a" not in machine.told
    device.stop()
    assert device.stopped
    device.restart((), replaced=True)
    assert not device.stopped
    device.synchronize()


def test_a_group_that_others_have_cut_counts_as_well(device: CudaDevice) -> None:
    """A drill, or the script: what waited in it looks complete."""
    device.lend()
    device._groups()[1].was_cut = True
    with pytest.raises(RuntimeError, match=CUT):
        device.synchronize()
    device.stop()
    device.restart((), replaced=False)
    device._groups()[1].was_cut = False
    device.synchronize()


def test_a_model_on_two_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one it is known whether it was cut."""
    places = [SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=index)) for index in (1, 0, 1)]
    model: Any = SimpleNamespace(parameters=lambda: places)
    monkeypatch.setattr(device_module, "nccl_groups", lambda: [SimpleNamespace()])
    with pytest.raises(ConfigError, match="its parameters lie on CUDA devices 0, 1"):
        device_module.accelerator(0, [model])
    del places[1]
    assert isinstance(device_module.accelerator(0, [model]), CudaDevice)
    assert NcclGroup.index == 1
    NcclGroup.index = None


def test_a_stop_waits_until_nothing_is_written_any_more(device: CudaDevice, machine: Machine) -> None:
    machine.at_rest.clear()
    stopper = threading.Thread(target=device.stop)
    stopper.start()
    stopper.join(0.05)
    assert stopper.is_alive()
    machine.at_rest.set()
    stopper.join()
    assert machine.told == ["abort a", "abort b"]


def test_a_device_that_does_not_come_to_rest_costs_the_process(
    device: CudaDevice, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_device, "_REST_S", 0.01)
    machine.at_rest.clear()
    with pytest.raises(DeviceError, match="rank 1, CUDA device 2: it has not come to rest"):
        device.stop()
    machine.at_rest.set()


def test_nor_does_one_that_fails(device: CudaDevice, machine: Machine) -> None:
    machine.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceError, match="an illegal memory access"):
        device.stop()


KINDS: list[tuple[Exception, str]] = [
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "DEVICE"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), "DEVICE"),
    (RuntimeError("CUDA error: device-side assert triggered"), ""),
    (RuntimeError("CUDA error: out of memory"), ""),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16384.00 GiB"), ""),
    (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited\nncclRemoteError: a call failed"), "HCCE"),
    (dist.DistBackendError("NCCL communicator was aborted on rank 0."), "HCCE"),
    (dist.DistBackendError("NCCL error in: x.cpp:1, invalid usage\nncclInvalidUsage: Duplicate GPU detected"), ""),
    (RuntimeError("The size of tensor a (3) must match"), ""),
    (ValueError("CUDA error: unspecified launch failure"), ""),
]


@pytest.mark.parametrize(("error", "kind"), KINDS)
def test_which_errors_are_a_faults(device: CudaDevice, error: Exception, kind: str) -> None:
    assert device.kind_of(error) == kind
