"""The loop with accelerate of docs/how-to/trainers.md, with dropout, BatchNorm, clipping and a scheduler."""

import argparse
import contextlib
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save", type=int, default=0)
parser.add_argument("--unseeded", action="store_true")
asked = parser.parse_args()

set_seed(7)
seeded = DataLoaderConfiguration(use_seedable_sampler=not asked.unseeded)  # else the order is in no epoch's number
accelerator = Accelerator(cpu=True, dataloader_config=seeded)
layers = [nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 4)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
data = TensorDataset(torch.randn(100, 12), torch.arange(100) % 4)
loader = DataLoader(data, batch_size=5, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
seen: list[float] = []


def body(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    for place, (inputs, targets) in enumerate(batches, 1):
        last = place == len(batches)
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss / len(batches))
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


windows = -(-len(loader) // asked.accumulate)
with rt.Session(model=model, optimizer=optimizer.optimizer, scheduler=scheduler.scheduler) as session:
    if asked.save:
        session.save_every(steps=asked.save)
    first, done = divmod(session.position.step, windows)
    for epoch in range(first, asked.epochs):
        loader.set_epoch(epoch)
        skipped = done * asked.accumulate if epoch == first else 0
        batches = iter(accelerator.skip_first_batches(loader, skipped))
        while window := list(islice(batches, asked.accumulate)):
            seen.append(session.call(body, window))
print(
    f"rank {accelerator.process_index} ends: last loss {seen[-1]:.6f}\n" if seen else "nothing to do\n",
    end="",
    flush=True,
)
