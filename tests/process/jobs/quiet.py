"""Trains, and writes nothing but, at its end, ``FOLDER/rank_N`` with what it has learnt: ``quiet.py FOLDER [SAVE]``.

It goes slowly until ``FOLDER/enough`` exists, and not to its end; it has begun when ``FOLDER/begun_N`` does.
"""

import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
torch.manual_seed(rank)
with rt.Session(model=model, optimizer=optimizer) as session:
    if len(sys.argv) > 2:
        session.save_every(steps=int(sys.argv[2]))
    for step in session.steps(60):
        with step:
            while step.number == 59 and not (folder / "enough").exists():
                time.sleep(0.01)
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.number == 3:
            (folder / f"begun_{rank}").touch()
        if not (folder / "enough").exists():
            time.sleep(0.1)
parameters = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
(folder / f"rank_{rank}").write_text(hashlib.sha256(parameters).hexdigest())
dist.destroy_process_group()
