"""A loop that evaluates other weights every five steps, and puts its own back: ``top`` of the loop, or in the ``body``;
there from step 5 on.

The model is large enough that its copy takes longer than it takes to change what is copied last.
"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link

parser = argparse.ArgumentParser()
parser.add_argument("where", choices=("top", "body"))
parser.add_argument("--all-die", action="store_true", help="behind step 12, once")
asked = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
core = nn.Sequential(nn.Linear(1500, 1500), nn.Tanh(), nn.Linear(1500, 1500))
model = DistributedDataParallel(core)
optimizer = torch.optim.AdamW(core.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
link = read_link()


def evaluate() -> None:
    """With twice the last layer; exactly what it was, afterwards."""
    with torch.no_grad():
        core[2].weight.mul_(2)
        time.sleep(0.2)
        core[2].weight.mul_(0.5)


with rt.Session(model=model, optimizer=optimizer) as session:
    session.save_every(steps=5)
    for step in session.steps(16):
        if asked.where == "top" and step.number % 5 == 0:
            evaluate()
        with step:
            if asked.where == "body" and step.number and step.number % 5 == 0:
                evaluate()
            (model(torch.randn(4, 1500)) - 1).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if asked.all_die and step.number == 12 and link is not None and link.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
