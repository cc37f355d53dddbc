"""A loop whose environment and arguments are not UTF-8; nobody reads them but itself."""

import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

assert os.environ["ODD"] == sys.argv[1] == "caf\udce9", (ascii(os.environ["ODD"]), sys.argv)
dist.init_process_group("gloo")
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(6):
        with step:
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
