"""``FOLDER``: rank 1 comes to its Session when FOLDER/<incarnation> is there; all train until FOLDER/enough is."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

folder = Path(sys.argv[1])
dist.init_process_group()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while dist.get_rank() == 1 and not (folder / os.environ["RESILIENT_INCARNATION"]).exists():
    time.sleep(0.01)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(100_000):
        with step:
            enough = torch.tensor(float((folder / "enough").exists()))
            dist.all_reduce(enough)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.01)
        if step.done and enough:
            break
