"""A loop whose later look at a step finds it wrong: a parameter was changed on all ranks alike, by a machine or not.

In step ``--at`` all ranks change a parameter, each time or (``--once``) the first time; ``--look`` steps later all say
so. Every ``--save`` updates a checkpoint is written.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--at", type=int, default=-1)
parser.add_argument("--look", type=int, default=5)
parser.add_argument("--once", action="store_true")
parser.add_argument("--save", type=int, default=0)
parser.add_argument("--memory", type=int)
asked = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
core = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
model = DistributedDataParallel(core)
optimizer = torch.optim.AdamW(core.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())
link = read_link()
first = link is not None and link.incarnation == 0
with rt.Session(model=model, optimizer=optimizer) as session:
    if asked.save:
        session.save_every(steps=asked.save, memory_steps=asked.memory)
    for step in session.steps(asked.steps):
        with step:
            loss = (model(torch.randn(8, 6)) - torch.randn(8, 3)).pow(2).mean()
            loss.backward()
            if step.number == asked.at and asked.at >= 0 and (first or not asked.once):
                for parameter in core.parameters():
                    parameter.grad.mul_(2)
            optimizer.step()
            optimizer.zero_grad()
        wrong = asked.at >= 0 and step.number == asked.at + asked.look and (first or not asked.once)
        if wrong and step.done:
            folder = Path(link.run_dir, "checkpoints") if link else Path()
            behind = f"step_{asked.at + 1 - (asked.at + 1) % asked.save + asked.save}" if asked.save else ""
            while behind and asked.save <= asked.look and not (folder / behind).exists():
                time.sleep(0.01)  # a wrong one is on its way
            session.anomaly(asked.at, "the validation has become worse")
dist.destroy_process_group()
