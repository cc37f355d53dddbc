"""What the pages call ``train.py``: saves now and then. With ``--until FILE`` it trains until that is there."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--until", type=Path)
args = parser.parse_args()
dist.init_process_group()
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
with rt.Session(model=model, optimizer=optimizer) as session:
    session.save_every(steps=10, memory_steps=5)
    for step in session.steps(1_000_000 if args.until else args.steps):
        with step:
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            enough = torch.tensor(float(args.until is not None and args.until.exists()))
            dist.all_reduce(enough)
        if args.until:
            time.sleep(0.005)
        if step.done and enough:
            break
