"""Scripts that a drill finds wanting, one by each word of ``MODES``; each knows what to say of one of them."""

import os
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

MODES = ("fails", "no-session", "drifts", "drifts-late", "carries", "not-taken-back", "ahead", "fine")
STEPS = 10

mode = sys.argv[1]
assert mode in MODES
if mode == "fails":
    sys.exit(3)


class Count:
    """Something with a state, which is registered and changed before the update, past torch, and not from the start:
    nobody sees that.
    """

    def __init__(self) -> None:
        self.value = torch.zeros(100_000)

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value.copy_(state["value"])


def draw() -> torch.Tensor:
    return torch.randn(2, 4)


dist.init_process_group("resilient")
rank = dist.get_rank()
if mode == "drifts":
    seed = torch.tensor([int.from_bytes(os.urandom(4))])
    dist.broadcast(seed, 0)
    torch.manual_seed(int(seed))
else:
    torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 4))
torch.manual_seed(100 + rank)
if mode != "no-session":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = Count()
    prefetched = draw()
    ahead = rt.Carried(make=draw)
    told = {"state": {"count": count}, "rank_state": {"ahead": ahead}}
    with rt.Session(model=model, optimizer=optimizer, **told) as session:
        for step in session.steps(STEPS):
            with step:
                if mode == "carries" and step.number < 6:  # as nanoGPT does it: a new process has another one in hand
                    inputs, prefetched = prefetched.clone(), draw()  # as to a device: so the Session can't see it
                elif mode == "ahead":
                    inputs = ahead.take()
                else:
                    inputs = draw()
                if mode == "drifts-late" and step.number >= 5:
                    inputs = inputs * (1 + random.random())
                if mode == "not-taken-back" and step.number >= 3:
                    count.value.numpy()[0] += 1
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if mode == "ahead":
                    ahead.fetch()
dist.destroy_process_group()
