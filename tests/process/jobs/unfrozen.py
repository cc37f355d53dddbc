"""A loop whose optimizer is given a second group in step 6, at the place that ``where`` names.

``body``: before the update; ``tail``: after it; ``head``: in front of the body. ``grown``: the model is given a layer
that was not there when the Session began.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("where")
parser.add_argument("steps", type=int)
parser.add_argument("--undo", action="store_true")
parser.add_argument("--save", type=int, default=0)
asked = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
model = DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(layers[2].parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())


def unfreeze(number: int, where: str) -> None:
    if number == 6 and where == asked.where:
        optimizer.add_param_group({"params": list(layers[0].parameters()), "lr": 1e-3})
    if number == 6 and where == "tail" and asked.where == "grown":
        grown = nn.Linear(3, 3, bias=False)
        nn.init.eye_(grown.weight)  # the same on all ranks
        layers.append(grown)


def wait_for_storage(session: rt.Session, commits: int) -> None:
    """So that no checkpoint is left out because storage is busy with the one before."""
    while session._driver._link.peers.settled < commits:
        time.sleep(0.005)


anew = False
with rt.Session(model=model, optimizer=optimizer, undo=asked.undo) as session:
    if asked.save:
        session.save_every(steps=asked.save)
    for step in session.steps(asked.steps):
        anew = anew or step.number == 0
        if anew and asked.save and step.number in (asked.save + 1, 2 * asked.save + 1):
            wait_for_storage(session, step.number - 1)
        unfreeze(step.number, "head")
        with step:
            unfreeze(step.number, "body")
            (model(torch.randn(8, 6)) - torch.randn(8, 3)).pow(2).mean().backward()
            optimizer.step()
            model.zero_grad()
            unfreeze(step.number, "tail")
dist.destroy_process_group()
