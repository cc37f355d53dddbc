"""Evaluates behind the update, through DistributedDataParallel, which begins with rank 0's buffers there: the next step
goes on with these. One of them is used in training. ``--sent``: rank 0's are broadcast by hand, buffer by buffer.
"""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.register_buffer("center", torch.zeros(3))
        # Nobody writes them. DDP's broadcast of so many kinds raises their versions, for a while.
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("masked", torch.zeros(3, dtype=torch.bool))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = (self.net(inputs) * self.scale).masked_fill(self.masked, 0.0) - self.center
        if self.training:
            self.center.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--sent", action="store_true")
asked = parser.parse_args()

dist.init_process_group("gloo")
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(0)
inputs = torch.randn(128, 8)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, 8, sampler=sampler)
model = DistributedDataParallel(Centred(), broadcast_buffers=not asked.sent)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with rt.Session(model=model, optimizer=optimizer, loader=loader) as session:
    for step in session.steps(asked.steps):
        with step:
            inputs, targets = step.batch
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        if step.number == 0:  # it stands last from here on, and DDP sends them as they stand
            held = model.module.center
            del model.module.center
            model.module.register_buffer("center", held.clone())
        if step.done and step.number % 3 == 2:
            for buffer in model.module.buffers() if asked.sent else ():
                dist.broadcast(buffer, 0)
            model.eval()
            with torch.no_grad():
                model(data.tensors[0])
            model.train()
dist.destroy_process_group()
