"""Sessions that go wrong in the way that ``sys.argv[1]`` names."""

import atexit
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import resilient_train as rt

mode = sys.argv[1]
if mode == "gloo-kept":
    # As if the group had been made before resilient_train was imported.
    c10d = dist.distributed_c10d
    c10d._new_process_group_helper = c10d._new_process_group_helper.__wrapped__
    dist.init_process_group("gloo")
elif mode != "no-group":
    dist.init_process_group("resilient")
rank = dist.get_rank() if dist.is_initialized() else 0
torch.manual_seed(rank if mode == "unequal" else 0)
model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Odd:
    def state_dict(self) -> dict:
        return {"inner": {"thing": object()}}

    def load_state_dict(self, state: dict) -> None:
        raise AssertionError(state)


class Large:
    """More than a rank can publish at first."""

    def state_dict(self) -> dict:
        return {"numbers": torch.zeros(1 << 18)}

    def load_state_dict(self, state: dict) -> None:
        raise AssertionError(state)


if mode == "other-torch":
    torch.__version__ = "2.16.0"
if mode == "leave-before" and rank == 1:
    sys.exit(0)
session = rt.Session(
    model=model,
    optimizer=optimizer,
    replicas=[[0]] if mode == "bad-replicas" else (),
    state={"odd": Odd()} if mode == "bad-state" else None,
    rank_state={"large": Large()} if mode == "large" else None,
)
if mode == "second-session":
    rt.Session(model=model, optimizer=optimizer)
with session:
    for step in session.steps(5):
        with step:
            if mode == "raise-slowly" and step.number == 2 and rank == 1:
                atexit.register(time.sleep, 1.5)  # a library that takes its time to end, after ...
                atexit.register(dist.destroy_process_group)
                raise ValueError("the user's own mistake")
            if mode == "leave" and step.number == 2 and rank == 1:
                os._exit(0)
            if mode == "raise" and step.number == 2 and rank == 1:
                raise ValueError("the user's own mistake")
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if mode == "raise-after" and step.number == 2 and rank == 1:
                raise ValueError("the user's own mistake")
            if mode == "closes-in-step" and step.number == 2:
                session.close()
        if mode == "closes-between" and step.number == 2:
            session.close()
