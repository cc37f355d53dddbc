"""The loop with Lightning Fabric of docs/how-to/trainers.md, with dropout, BatchNorm, clipping, a scheduler and
accumulation. Which pass of the loader it is, Fabric counts by itself.
"""

import argparse
import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save", type=int, default=0)
asked = parser.parse_args()

fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
fabric.launch()
fabric.seed_everything(7, verbose=False)
layers = [nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 4)]
net = nn.Sequential(*layers)
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, 50)
data = TensorDataset(torch.randn(100, 12), torch.arange(100) % 4)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=5, shuffle=True))

with rt.Session(model=model, optimizer=optimizer.optimizer, scheduler=scheduler, loader=loader) as session:
    if asked.save:
        session.save_every(steps=asked.save)
    for step in session.steps(asked.steps):
        with step:
            inputs, targets = step.batch
            last = (step.number + 1) % asked.accumulate == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                fabric.backward(loss / asked.accumulate)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
print(f"rank {fabric.global_rank} ends: last loss {loss.item():.6f}\n", end="", flush=True)
