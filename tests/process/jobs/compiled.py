"""Dynamo compiles the wrapper (``outer``), what it wraps (``inner``), a function that calls it (``step``), or one that
calls ``optimizer.step()`` (``update``); or its layers (``layers``). Batches may change their size (``sizes``).
"""

import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


BACKEND = "aot_eager"  # a compiler of C++ takes half a minute; what Dynamo does with frames is the same
how = sys.argv[1].split("+")
dist.init_process_group()
torch.manual_seed(0)
core: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
if "layers" in how:
    core[2], core[3] = Layer(nn.Linear(32, 32)), torch.compile(Layer(nn.Linear(32, 4)), backend=BACKEND, fullgraph=True)
    core[2].compile(backend=BACKEND, fullgraph=True)
model = DistributedDataParallel(torch.compile(core, backend=BACKEND) if "inner" in how else core)
forward = torch.compile(model, backend=BACKEND) if "outer" in how else model
if "step" in how:

    @torch.compile(backend=BACKEND)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()


optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
update = torch.compile(optimizer.step, backend=BACKEND) if "update" in how else optimizer.step
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(100 + dist.get_rank())
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(8):
        with step:
            forward(torch.randn(8 + step.number % 3 * ("sizes" in how), 16)).square().mean().backward()
            update()
            optimizer.zero_grad()
dist.destroy_process_group()
