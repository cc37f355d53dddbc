"""Loses rank 1 when all have their group and their Session, and none is at its first step; the first time only.

With ``all``: all ranks, before they have a group.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link

link = read_link()
assert link is not None
loses_all = sys.argv[1:] == ["all"]
if loses_all and not link.attempt:
    os.kill(os.getpid(), signal.SIGKILL)
dist.init_process_group("resilient")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    if rank == 1 and not loses_all and not link.attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    for step in session.steps(3):
        with step:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    Path(link.run_dir, f"attempt_of_rank{rank}").write_text(str(link.attempt))
dist.destroy_process_group()
