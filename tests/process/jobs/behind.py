"""What a cut body meets: code behind it uses one of its names (``unbound``), or its cut is swallowed (``swallows``).
And what it leaves to the tail: modules of which all ranks have the same are written there (``written``);
or rank 0 alone draws random numbers in each second one (``evaluates``); or each rank writes its own there (``apart``).
"""

import argparse
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("unbound", "swallows", "written", "evaluates", "apart"))
parser.add_argument("steps", type=int)
asked = parser.parse_args()


def halve(net: nn.Module) -> None:
    """A ``return`` in a ``finally`` drops whatever was raised."""
    try:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
                time.sleep(0.05)
    finally:
        return  # noqa: B012 - that is what is tried


class Routed(nn.Module):
    """``load`` is what a forward pass has seen, ``bias`` and ``bank`` are written behind the update, ``late`` for the
    first time in the fourth step; ``norm`` has statistics of each rank's own, and ``site`` is another from the start;
    ``scale`` is always the same, in memory that nobody can write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((1,), 2.0).expand(8))
        self.register_buffer("site", torch.full((8,), 0.1 * dist.get_rank()))
        self.load = torch.zeros(8)
        self.updates = 0
        for name, value in (("bias", torch.zeros(8)), ("bank", torch.zeros(20, 8)), ("late", torch.zeros(8))):
            self.register_buffer(name, value)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.load = (inputs.detach() > 0).float().sum(0)
        return self.norm(self.scale * inputs - self.site) * (1 + self.bias) + self.late + self.bank.sum(0)

    def write(self, load: torch.Tensor, number: int) -> None:
        self.bias += 0.05 * (load.mean() - load).sign()
        self.bank[number] = 0.01 * load
        self.updates += 1
        if number >= 3:
            self.late += 0.1 * self.updates

    def get_extra_state(self) -> dict[str, int]:
        return {"updates": self.updates}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]


class Apart(nn.Module):
    """All are the same on all ranks in front of each update, or of some: DistributedDataParallel begins with rank 0's.
    They are written behind the first nine.

    ``mean`` is made equal in each fourth step, ``peak`` rank 0 alone writes, and ``count`` all write the same.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in ("last", "mean", "peak", "count"):
            self.register_buffer(name, torch.ones(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.last + self.mean + self.peak + 0.01 * self.count

    def write(self, loss: torch.Tensor, number: int) -> None:
        self.count += 1
        self.last.lerp_(loss.detach().expand(8), 0.5)
        self.mean.lerp_(loss.detach().expand(8), 0.5)
        if number % 4 == 3:
            dist.all_reduce(self.mean)
            self.mean /= dist.get_world_size()
        if dist.get_rank() == 0:
            self.peak.copy_(torch.maximum(self.peak, loss.detach()))
            self.peak += 0.1


random.seed(0)
np.random.seed(0)  # noqa: NPY002 - what a rank carries
torch.manual_seed(0)
dist.init_process_group("gloo")
routed = {"written": Routed, "apart": Apart}.get(asked.kind, nn.Tanh)()
net = nn.Sequential(nn.Linear(6, 8), routed, nn.Linear(8, 3))
model = DistributedDataParallel(net, broadcast_buffers=asked.kind != "written")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(asked.steps):
        with step:
            torch.manual_seed(step.number * 7 + dist.get_rank())
            loss = model(torch.randn(4, 6)).pow(2).mean()
            loss.backward()
            if asked.kind == "swallows":
                halve(model)
            if asked.kind == "written":
                load = routed.load
                dist.all_reduce(load)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if asked.kind == "written":
                routed.write(load, step.number)
            if asked.kind == "apart" and step.number < 9:
                routed.write(loss, step.number)
            if asked.kind == "evaluates" and step.number % 2 and dist.get_rank() == 0:
                torch.rand(3)
        if asked.kind == "unbound":
            assert loss.item() >= 0
            assert norm.item() >= 0
dist.destroy_process_group()
