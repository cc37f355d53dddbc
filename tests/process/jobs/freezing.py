"""A backbone that is frozen behind ``DDP(...)``: ``freezing.py WAYS STEPS``.

``between``: in front of the Session; else in the body of step 2. ``thaws``: and trained again from step 10 on.
``unused``: the wrapper finds unused parameters; ``static``: its graph is static. ``hook``: it has a hook. ``words``:
with an embedding whose gradients are sparse.
"""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("ways", type=lambda text: frozenset(text.split("+")))
parser.add_argument("steps", type=int)
asked = parser.parse_args()
ways = asked.ways


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words((x[:, 0].abs() * 10).long() % 16)


dist.init_process_group("gloo")
torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 32))
first = Words() if "words" in ways else nn.Linear(6, 6)
net = nn.Sequential(first, backbone, nn.Tanh(), nn.Linear(32, 3))
model = DistributedDataParallel(
    net, find_unused_parameters="unused" in ways, static_graph="static" in ways, bucket_cap_mb=0.005
)
if "hook" in ways:
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if "words" in ways else 0.9)
if "between" in ways:
    backbone.requires_grad_(False)
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(1 + dist.get_rank())
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(asked.steps):
        with step:
            if step.number == 2 and "between" not in ways:
                backbone.requires_grad_(False)
            if step.number == 10 and "thaws" in ways:
                backbone.requires_grad_(True)
            (model(torch.randn(8, 6)) - torch.randn(8, 3)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
