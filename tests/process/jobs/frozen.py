"""Writes to storage that is frozen, and so can't be killed: ``frozen.py FILE TIMES``.

Rank 1 does so in its sixth step; if TIMES is 2, the process that replaces it does so before it has come to its Session.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link

link = read_link()
assert link is not None
target, own = Path(sys.argv[1]), (link.rank, link.incarnation)
if own == (1, 1) and sys.argv[2] == "2":
    target.with_name("second").write_bytes(bytes(1 << 16))
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(30):
        with step:
            if own == (1, 0) and step.number == 5:
                Path(link.run_dir, "ready").touch()
                while not Path(link.run_dir, "frozen").exists():
                    time.sleep(0.01)
                target.write_bytes(bytes(1 << 16))
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
