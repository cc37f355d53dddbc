"""A loop beside which something has parameters that the Session need not know, or does.

``beside.py WHAT``: ``average`` (an EMA, written by torch), ``written`` (one that is written past torch's counters),
``taught`` (a frozen copy gives the targets), ``drawn`` (one that is drawn without a seed), ``scheduled`` (a scheduler
of the registered optimizer). ``--registered``: as a model, or in ``state``. ``--seeds``: each rank has its own until
DistributedDataParallel's broadcast. ``--called``: the loop gives its bodies to ``session.call``, and what stands beside
is made when it has asked for its position.
"""

import argparse
import copy
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class Beside(nn.Module):
    """What stands beside the model: a copy of it, with numbers of its own."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held.requires_grad_(False)


def average(slow: nn.Module, fast: nn.Module, *, past_torch: bool) -> None:
    for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
        if past_torch:
            one.data.mul_(0.9).add_(other.data, alpha=0.1)
        else:
            with torch.no_grad():
                one.mul_(0.9).add_(other, alpha=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["average", "written", "taught", "drawn", "scheduled"])
    parser.add_argument("--registered", choices=["", "model", "state"], default="")
    parser.add_argument("--on-rank", type=int, default=-1, help="the only one that has it")
    parser.add_argument("--seeds", action="store_true")
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--called", action="store_true")
    asked = parser.parse_args()
    dist.init_process_group(timeout=timedelta(seconds=60))
    torch.manual_seed(dist.get_rank() if asked.seeds else 0)
    model = DistributedDataParallel(build())
    if asked.what == "drawn":
        torch.seed()
    beside: Any = None
    if asked.on_rank in (-1, dist.get_rank()) and not asked.called:
        beside = Beside(build() if asked.what == "drawn" else copy.deepcopy(model.module))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + dist.get_rank())
    registered: dict[str, Any] = {"model": [model, beside]} if asked.registered == "model" else {"model": model}
    if asked.registered == "state":
        registered["state"] = {"beside": beside}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def scheduled() -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12) if asked.what == "scheduled" else None

    scheduler = None if asked.called else scheduled()

    def body() -> None:
        inputs = torch.randn(8, 16)
        targets = inputs[:, :4]
        if asked.what in ("taught", "drawn"):
            targets = beside.held(inputs)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        if asked.what in ("average", "written") and beside is not None:
            average(beside, model.module, past_torch=asked.what == "written")

    with rt.Session(optimizer=optimizer, **registered) as session:
        if asked.save:
            session.save_every(steps=asked.save)
        if asked.called:
            first = session.position.step
            beside, scheduler = Beside(copy.deepcopy(model.module)), scheduled()
            for _ in range(first, 12):
                session.call(body)
        else:
            for step in session.steps(12):
                with step:
                    body()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
