"""What a cut body meets: code behind it uses one of its names (``unbound``), or its cut is swallowed (``swallows``)."""

import argparse
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("unbound", "swallows"))
parser.add_argument("steps", type=int)
asked = parser.parse_args()


def halve(net: nn.Module) -> None:
    """A ``return`` in a ``finally`` drops whatever was raised."""
    try:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
                time.sleep(0.05)
    finally:
        return  # noqa: B012 - that is what is tried


random.seed(0)
np.random.seed(0)  # noqa: NPY002 - what a rank carries
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(asked.steps):
        with step:
            torch.manual_seed(step.number * 7 + dist.get_rank())
            loss = model(torch.randn(4, 6)).pow(2).mean()
            loss.backward()
            if asked.kind == "swallows":
                halve(model)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if asked.kind == "unbound":
            assert loss.item() >= 0
            assert norm.item() >= 0
dist.destroy_process_group()
