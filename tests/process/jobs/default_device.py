"""A script that has set a default device (``torch.set_default_device("cuda")``) and keeps what it trains elsewhere.

Here that is the meta device: a tensor that the library makes on it, where it means the host's memory, has no memory.
"""

import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

default, steps = sys.argv[1], int(sys.argv[2])
HOST = torch.device("cpu")


class Mean:
    def __init__(self) -> None:
        self.value = torch.zeros(4, device=HOST)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


dist.init_process_group("gloo")
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(0)
with HOST:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
    ema = nn.Linear(16, 1)
    draws = torch.Generator()
    draws.manual_seed(dist.get_rank())
torch.set_default_device(default)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
mean = Mean()

with rt.Session(
    model=model, optimizer=optimizer, state={"ema": ema}, rank_state={"mean": mean, "draws": draws}
) as session:
    for step in session.steps(steps):
        with step, HOST:
            inputs = torch.randn(4, 8, generator=draws) + mean.value[:1]
            mean.value = 0.9 * mean.value + inputs.mean()
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.done:
            with torch.no_grad():
                for average, parameter in zip(ema.parameters(), net[-1].parameters(), strict=True):
                    average.lerp_(parameter, 0.1)
dist.destroy_process_group()
