"""A rank that does not wait for ever: ``late_waits.py VERB HOW LATE``, the step in which rank 1 comes late."""

import random
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import resilient_train as rt

verb, how = sys.argv[1:3]
STEPS, LATE, LIMIT = 6, int(sys.argv[3]), timedelta(milliseconds=100)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)  # noqa: NPY002 - what a rank carries
model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def begin(tensor: torch.Tensor) -> dist.Work:
    if verb == "reduce":
        return dist.all_reduce(tensor, async_op=True)
    return dist.isend(tensor, 0) if rank else dist.irecv(tensor, 1)


def wait(work: dist.Work, *, late: bool) -> None:
    """No other step has a limit: a busy machine would keep that of its own as well."""
    if rank or not late:
        work.wait(timedelta(0))
        return
    if how not in ("polls", "goes on"):
        work.wait(LIMIT)
        return
    while True:
        try:
            work.wait(LIMIT)
        except RuntimeError as error:
            print("told:", error, flush=True)
            if how == "polls":
                continue
        return


with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(STEPS):
        with step:
            model(torch.full((2, 3), rank + step.number * 0.1)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            given = torch.full((3,), rank + 1.0)
            if how == "in the tail":
                optimizer.step()
            late = step.number == LATE and (step.attempt == 0 or how == "always late")
            if rank and late:
                time.sleep(0.7)
            wait(begin(given), late=late)
            if how != "in the tail":
                dist.broadcast(given, 0)
                model.bias.grad += given
                optimizer.step()
            elif not rank:
                print("given:", given.tolist(), flush=True)
            optimizer.zero_grad()
