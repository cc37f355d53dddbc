"""Loses all ranks before they have a Session; the first time only."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link

link = read_link()
assert link is not None
if not link.attempt:
    os.kill(os.getpid(), signal.SIGKILL)
dist.init_process_group("resilient")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(3):
        with step:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
Path(link.run_dir, f"attempt_of_rank{link.rank}").write_text(str(link.attempt))
dist.destroy_process_group()
