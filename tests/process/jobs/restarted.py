"""Loses rank 1 when all have their group and their Session, and none is at its first step; the first time only.

With ``all``: all ranks, before they have a group. With ``behind``: rank 1 at its second step, and the others by the
process that comes in its place, which has no group yet then. Nor has one that comes in the place of the first of these
before the second is dead: it waits.
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
mode = sys.argv[1] if sys.argv[1:] else ""
if mode == "all" and not link.attempt:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "behind" and not link.attempt:
    if link.joining:
        if link.rank == 1:
            for file in Path(link.run_dir).glob("pid_*"):
                os.kill(int(file.read_text()), signal.SIGKILL)
        signal.pause()
    if link.rank != 1:
        Path(link.run_dir, f"pid_{link.rank}").write_text(str(os.getpid()))
dist.init_process_group("resilient")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    if rank == 1 and not mode and not link.attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "behind":
        session.save_every(steps=1)
    for step in session.steps(3):
        with step:
            if mode == "behind" and rank == 1 and step.number == 1 and not link.attempt:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    Path(link.run_dir, f"attempt_of_rank{rank}").write_text(str(link.attempt))
dist.destroy_process_group()
