"""A rank that does not wait for ever: ``late_waits.py VERB HOW LATE``, the step in which rank 1 comes late, or dies."""

import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import resilient_train as rt
from resilient_train.config import read_link

verb, how = sys.argv[1:3]
STEPS, LATE, LIMIT = 6, int(sys.argv[3]), timedelta(milliseconds=100)
dist.init_process_group("gloo")
rank, link = dist.get_rank(), read_link()
assert link is not None
told = Path(link.run_dir, "told")
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
    if how not in ("polls", "dies", "goes on"):
        work.wait(LIMIT)
        return
    while True:
        try:
            work.wait(LIMIT)
        except RuntimeError as error:
            print("told:", error, flush=True)
            told.touch()
            if how != "goes on":
                continue
        return


def come_late() -> None:
    """When the time of who waits has run out: it says so, or all are to run the step again."""
    while not (told.exists() or session._driver.stopped()):
        time.sleep(0.01)
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)


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
            if rank and late and link.incarnation == 0:
                come_late()
            wait(begin(given), late=late)
            if how != "in the tail":
                dist.broadcast(given, 0)
                model.bias.grad += given
                optimizer.step()
            elif not rank:
                print("given:", given.tolist(), flush=True)
            optimizer.zero_grad()
