"""A script that goes on from its own newest checkpoint: a replacement finds what this very job has written."""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint", type=Path)
parser.add_argument("way", choices=["subtracts", "starts", "broadcasts"])
asked = parser.parse_args()
STEPS, SAVED_AT = 16, 6

dist.init_process_group("gloo")
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
done = torch.load(asked.checkpoint)["done"] if asked.checkpoint.exists() else 0
if asked.way == "broadcasts":
    told = [done]
    dist.broadcast_object_list(told, src=0)
    done = told[0]
total, start, offset = (STEPS - done, 0, done) if asked.way == "subtracts" else (STEPS, done, 0)
data = torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))

with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(total, start=start):
        with step:
            model(data[offset + step.number]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.done and step.number == SAVED_AT and dist.get_rank() == 0:
            part = asked.checkpoint.with_suffix(".part")
            torch.save({"done": step.number + 1}, part)
            part.replace(asked.checkpoint)
dist.destroy_process_group()
