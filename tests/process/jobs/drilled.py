"""Scripts that a drill finds wanting, one by each word: ``fails``, ``no-session``, ``drifts``."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

mode = sys.argv[1]
if mode == "fails":
    sys.exit(3)
dist.init_process_group("resilient")
if mode == "drifts":
    seed = torch.tensor([int.from_bytes(os.urandom(4))])
    dist.broadcast(seed, 0)
    torch.manual_seed(int(seed))
model = DistributedDataParallel(torch.nn.Linear(4, 4))
if mode == "drifts":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rt.Session(model=model, optimizer=optimizer) as session:
        for step in session.steps(8):
            with step:
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
dist.destroy_process_group()
