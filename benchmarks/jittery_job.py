"""A job that is often late, and never hung: seeded pauses of up to a hundred steps, garbage collections, page faults.

Argument: number of steps.
"""

import gc
import random
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import make

import resilient_train as rt

_STEP_S = 0.001


def disturb(chance: random.Random) -> None:
    """One step in ten is late by ten usual steps, one in a thousand by a hundred; on this rank alone."""
    dice = chance.random()
    if dice < 0.001:
        time.sleep(100 * _STEP_S)
    elif dice < 0.1:
        time.sleep(chance.random() * 10 * _STEP_S)
    elif dice < 0.105:
        gc.collect()
    elif dice < 0.11:
        torch.zeros(20_000_000).add_(1)  # 80 MB that nobody has touched yet


dist.init_process_group("resilient")
work = make("tiny")
model = DistributedDataParallel(work.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
chance = random.Random(dist.get_rank())
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(int(sys.argv[1])):
        with step:
            disturb(chance)
            torch.nn.functional.cross_entropy(model(work.inputs), work.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
