"""A body that catches what fails in it and gives its batch up, as scripts do for one that needs too much memory.

``caught.py steps|calls STEPS``. Behind the loop ranks communicate once more.
"""

import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

loop, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)


def body(number: int) -> float | None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    try:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
    except RuntimeError:
        optimizer.zero_grad()
        return None
    optimizer.zero_grad()
    return loss.item()


with rt.Session(model=model, optimizer=optimizer) as session:
    if loop == "steps":
        for step in session.steps(steps):
            with step:
                loss = body(step.number)
            if step.done:
                assert loss is not None
    else:
        for number in range(session.position.step, steps):
            assert session.call(body, number) is not None
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.destroy_process_group()
