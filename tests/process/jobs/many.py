"""A loop whose last rank dies in every third step; rank 0 writes down what it holds of the machine."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

import resilient_train as rt
from resilient_train.config import read_link

STEPS = int(sys.argv[1])
dist.init_process_group("resilient", timeout=timedelta(seconds=20))
link = read_link()
assert link is not None
torch.manual_seed(0)
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
me = psutil.Process()
holdings = Path(link.run_dir) / "holdings.jsonl"
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(STEPS):
        with step:
            if link.rank == 1 and step.number == 3 * link.incarnation + 2:
                os.kill(os.getpid(), 9)
            model(torch.ones(2, 64) * step.number).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        if link.rank == 0 and step.number % 3 == 0:
            now = {"threads": me.num_threads(), "fds": me.num_fds(), "rss": me.memory_info().rss}
            with holdings.open("a") as file:
                file.write(json.dumps(now) + "\n")
