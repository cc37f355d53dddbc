"""The demonstration's training script, and an example of one.

Apart from the Session and its ``with step:`` it is what one would write for torchrun::

    resilient-run --nproc-per-node 4 -m resilient_train.demo.job --steps 60
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

import resilient_train as rt
from resilient_train.config import read_link
from resilient_train.demo.gpt import GPT
from resilient_train.demo.text import VOCABULARY, Windows

LENGTH = 64
BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps: int = parser.parse_args().steps

    dist.init_process_group("resilient")
    rank = dist.get_rank()
    # Each rank draws its own dropout; DDP hands rank 0's parameters to all.
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1234 + rank)

    dataset = Windows(LENGTH)
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset), batch_size=BATCH, drop_last=True)
    model = DistributedDataParallel(GPT(VOCABULARY, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))

    with rt.Session(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler) as session:
        for step in session.steps(steps):
            with step:
                inputs, targets = step.batch
                loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                record_loss(rank, step.number, loss.item())

    dist.destroy_process_group()


def record_loss(rank: int, step: int, loss: float) -> None:
    """Appends to ``RUN/loss_rank<r>.jsonl``. A step that ran twice stands there twice: the last counts."""
    link = read_link()
    if link is not None:
        with Path(link.run_dir, f"loss_rank{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")


if __name__ == "__main__":
    main()
