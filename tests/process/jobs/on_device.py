"""``on_device.py ddp|fsdp|hsdp STEPS``: what is trained lies on an ``npu``, and a bit of it on the host."""

import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resilient_train as rt

layout, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
NPU = torch.device("npu")
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(0)


class Mean:
    """Of this rank's inputs."""

    def __init__(self) -> None:
        self.value = torch.zeros(8, device=NPU)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


class Scaled(nn.Linear):
    """Its scale is no buffer, and takes what it is given as it is."""

    scale = torch.ones(1, device=NPU)  # one of no dimension might lie on the host

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.scale = 0.9 * self.scale + 0.1 * inputs.detach().square().mean()
        return super().forward(inputs / self.scale)

    def get_extra_state(self) -> torch.Tensor:
        return self.scale

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = state


class Placed(torch.optim.SGD):
    """It counts on the device, and keeps what is large on the host: neither is what ``load_state_dict`` makes of it."""

    def step(self, closure: None = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                held = self.state[parameter]
                if not held:
                    held["step"] = torch.zeros((), device=NPU)
                    held["slow"] = torch.zeros(parameter.shape, device="cpu")
                held["step"].add_(torch.ones((), device=NPU))
                held["slow"].lerp_(parameter.grad.cpu(), 0.5)
                parameter.sub_(held["slow"].to(NPU) / held["step"])


data = TensorDataset(torch.randn(48, 8), torch.randn(48, 4))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4)).to(NPU)
ema = nn.Linear(16, 4).to(NPU)
if layout == "ddp":
    net[1] = nn.BatchNorm1d(16).to(NPU)
    net[3] = Scaled(16, 4).to(NPU)
    model: nn.Module = DistributedDataParallel(net)
else:
    hsdp = layout == "hsdp"
    mesh = init_device_mesh(
        "npu", (2, 2) if hsdp else (2,), mesh_dim_names=("replicate", "shard") if hsdp else ("shard",)
    )
    fully_shard(net[0], mesh=mesh)
    model = fully_shard(net, mesh=mesh)
optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters(), 1e-2)]
head = nn.Linear(4, 4).to(NPU)
if layout == "ddp":
    head = DistributedDataParallel(head)
    optimizers.append(Placed(head.parameters(), 1e-2))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], steps)
torch.manual_seed(1 + dist.get_rank())
mean = Mean()

with rt.Session(
    model=[model, head] if layout == "ddp" else model,
    optimizer=optimizers,
    undo=layout == "ddp",
    loader=loader,
    state={"ema": ema, "schedule": schedule},
    rank_state={"mean": mean},
) as session:
    if layout == "fsdp":
        session.save_every(steps=1000, memory_steps=1)
    for step in session.steps(steps):
        with step:
            inputs, targets = (each.to(NPU) for each in step.batch)
            mean.value = 0.9 * mean.value + 0.1 * inputs.mean(0)
            found = model(inputs - mean.value)
            if layout == "ddp":
                found = head(found)
                net[0].weight.data.clamp_(-0.2, 0.2)  # which moves no version
            (found - targets).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for each in optimizers:
                each.step()
                each.zero_grad()
        if step.done:
            schedule.step()
            if layout == "ddp":
                with torch.no_grad():
                    for average, parameter in zip(ema.parameters(), net[3].parameters(), strict=True):
                        average.lerp_(parameter, 0.1)
dist.destroy_process_group()
