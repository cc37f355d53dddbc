"""A model on the fake accelerator, its twin on the host, and copiers that copy when they are told."""

from __future__ import annotations

import mmap
import threading

import torch
from torch import nn

from pure.fake_accelerator import Machine
from resilient_train._native import DIGEST_CHUNK_BYTES, Copier
from resilient_train.frameworks.accelerator import Host
from resilient_train.frameworks.roles import Image, Objects, SaveShare
from resilient_train.frameworks.torch.rank_state import TorchRankState
from resilient_train.frameworks.torch.state import TorchState
from resilient_train.frameworks.torch.tensors.staging import Staging

STEP = 7
WHOLE = SaveShare(0, 1, 0, 1)
TIMEOUT_S = 20


class Model(nn.Module):
    """Every kind of tensor that there is, and more bytes than go into two buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.large = nn.Parameter(torch.randn(1500, 901, generator=draw))
        self.turned = nn.Parameter(torch.randn(33, 7, generator=draw).t())
        self.brief = nn.Parameter(torch.randn(5, 3, generator=draw).to(torch.bfloat16))
        self.scalar = nn.Parameter(torch.randn((), generator=draw))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mean", torch.randn(9, generator=draw))
        self.register_buffer("count", torch.tensor(3))


class Trained:
    """A model, its optimizer and its state: on the machine's device, or on the host."""

    def __init__(
        self, machine: Machine | None = None, *, seed: int = 0, buffers: int = 32, staging: Staging | None = None
    ) -> None:
        self.machine = machine
        self.model = Model(seed)
        if machine is not None:
            for name, parameter in list(self.model.named_parameters()):
                setattr(self.model, name, nn.Parameter(machine.to_device(parameter)))
            for name, buffer in list(self.model.named_buffers()):
                self.model._buffers[name] = machine.to_device(buffer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)
        module, pin = (lambda _: machine), machine.pin if machine is not None else torch.empty
        staging = staging or Staging(buffers * DIGEST_CHUNK_BYTES, module, pin)
        objects = Objects((self.model,), (self.optimizer,))
        self.state = TorchState(objects, TorchRankState((), {}), Host(), staging)

    def update(self, factor: float) -> None:
        """What an optimizer does to parameters and moments."""
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() * factor
        self.optimizer.step()

    def forward(self) -> None:
        """What a forward pass does to buffers."""
        with torch.no_grad():
            for buffer in self.model.buffers():
                buffer.add_(1)

    def values(self) -> list[torch.Tensor]:
        """All tensors of the state as they will be when the device has done all."""
        tensors = self.state.tensors().values()
        return [self.machine.value(each) if self.machine else each.detach().clone() for each in tensors]


def trained_pair(machine: Machine, *, buffers: int = 32) -> tuple[Trained, Trained]:
    """On the device, where not all may have been done yet, and on the host: the same state."""
    device, host = Trained(machine, buffers=buffers), Trained()
    for each in (device, host):
        each.update(0.5)
        each.update(0.25)
    return device, host


def room(image: Image) -> memoryview:
    return memoryview(mmap.mmap(-1, image.total_bytes))


def host_image(host: Trained) -> tuple[bytes, bytes]:
    """What the image of this state is, and its digests."""
    image = host.state.image(STEP, WHOLE)
    memory = room(image)
    capture = image.begin(memory, Copier())
    digests = capture.finish()
    return bytes(memory), digests


class LateCopier:
    """Copies when it is waited for, and not before ``go`` is set. ``broken``: what it does not do, from now on."""

    def __init__(self) -> None:
        self.broken = ""
        self.inner = Copier(1)
        self.go = threading.Event()
        self.waits = 0
        self._begun = None

    def gather(self, image, pieces, *, owner=None) -> None:
        assert self._begun is None, "one copy at a time"
        if self.broken == "gather":
            raise OSError("no thread")
        self._begun = image, pieces, owner

    def wait(self, timeout_ms: int) -> bool:
        self.waits += 1
        assert self.go.wait(TIMEOUT_S)
        if self.broken == "wait":
            raise OSError("memory fails")
        if self.broken == "late":
            return False
        begun, self._begun = self._begun, None
        if begun is not None:
            self.inner.gather(begun[0], begun[1], owner=begun[2])
        return self.inner.wait(timeout_ms)

    @property
    def done(self) -> bool:
        return self._begun is None and self.inner.done

    def digests(self) -> bytes:
        return self.inner.digests()

    def abort(self) -> None:
        self._begun = None
        self.inner.abort()
