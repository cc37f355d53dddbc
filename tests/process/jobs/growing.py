"""A rank whose own state grows with each step; it writes how many descriptors it holds: ``growing.py FOLDER``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

STEPS = 9


class Growing:
    def __init__(self) -> None:
        self.data = b""

    def state_dict(self) -> dict:
        return {"data": self.data}

    def load_state_dict(self, state: dict) -> None:
        self.data = state["data"]


dist.init_process_group("gloo")
own = Growing()
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer, rank_state={"own": own}) as session:
    for step in session.steps(STEPS):
        with step:
            own.data = bytes(1 << (13 + step.number))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), os.getppid())]
        with Path(sys.argv[1], f"descriptors_{dist.get_rank()}").open("a") as file:
            file.write(f"{step.number} {counts[0]} {counts[1]}\n")
dist.destroy_process_group()
