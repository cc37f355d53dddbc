"""Loops that change registered state where a fault brings it back: in front of the update of its step.

``momentum``: a second encoder follows the first one in its forward pass (MoCo); ``assigned``, ``silent``: as that,
past torch's version counter, with a new tensor or in place. ``counter``: samples are counted in the body. ``average``:
an average, too large to be copied at each step for nothing, is updated between the head of the loop and its body.
``behind``: behind ``with step:``, where that may be an attempt that is repeated. ``rate``: a scheduler steps at the top
of the loop. ``rarely``: as ``momentum``, but in one step only. ``replaced``: as ``momentum``, with a new parameter in
the place of the old one. ``decay``: the parameters are made smaller behind ``with step:``. ``array``: a NumPy array
counts. ``groups``: the bias is given to the optimizer at the top of step 6. ``sampler``: the place in the data is in
``state=``; ``sampler+passes``: it moves from the second pass on alone; ``accumulate``: it is the rank's own, and two
steps make an update. Several (``silent+counter``) are one loop that changes all of that.
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link

parser = argparse.ArgumentParser()
parser.add_argument("what")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--rare", type=int, default=9, help="the step that is another one")
parser.add_argument("--save", type=int, default=0)
parser.add_argument("--all-die", type=int, default=-1, help="behind this step, once")
asked = parser.parse_args()
WHAT = asked.what.split("+")


class Followed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.key = nn.Linear(40, 40), nn.Linear(40, 40)
        self.key.requires_grad_(False)
        self.now = True

    def follow(self) -> None:
        for mine, theirs in zip(self.key.parameters(), self.encoder.parameters(), strict=True):
            if "assigned" in WHAT:
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            elif "replaced" in WHAT:
                self.key.weight = nn.Parameter(self.key.weight * 0.9 + self.encoder.weight.detach() * 0.1, False)
                return
            elif "silent" in WHAT:
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
            else:
                with torch.no_grad():
                    mine.mul_(0.9).add_(theirs, alpha=0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.now:
            self.follow()
        return self.encoder(inputs) - self.key(inputs.flip(1))


class Counter:
    """Of samples, and a list of the last ones."""

    def __init__(self) -> None:
        self.samples, self.recent, self.array = 0, [torch.zeros(3)], np.zeros(50_000)

    def state_dict(self) -> dict:
        array = {"array": self.array} if "array" in WHAT else {}
        return {"samples": self.samples, "recent": self.recent, **array}

    def load_state_dict(self, state: dict) -> None:
        self.samples, self.recent = state["samples"], list(state["recent"])
        self.array = state.get("array", self.array)


class Places:
    """A sampler that can be resumed."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self):
        while self.place < 4000:
            self.place += 1
            yield self.place

    def __len__(self) -> int:
        return 4000

    def state_dict(self) -> dict:
        return {"place": self.place}

    def load_state_dict(self, state: dict) -> None:
        self.place = state["place"]


class Passes(Places):
    """Each pass but the first one is of other samples."""

    def set_epoch(self, epoch: int) -> None:
        self.place += epoch

    def __iter__(self):
        return iter(range(self.place, self.place + 24))

    def __len__(self) -> int:
        return 24


class Data(torch.utils.data.Dataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(40, generator=torch.Generator().manual_seed(2 * index + rank))


class Average:
    """Of the parameters, with as much beside it as makes it large; it counts its updates."""

    def __init__(self, model: nn.Module) -> None:
        self.updates = 0
        self.held = [parameter.detach().clone() for parameter in model.parameters()] + [torch.zeros(300_000)]

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for mine, theirs in zip(self.held, [*model.parameters(), torch.ones(300_000)], strict=True):
            mine.mul_(0.9).add_(theirs.detach(), alpha=0.1)

    def state_dict(self) -> dict:
        return {"updates": self.updates, "held": self.held}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        for mine, theirs in zip(self.held, state["held"], strict=True):
            mine.copy_(theirs)


dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
core = Followed()
model = DistributedDataParallel(core)
trained = list(core.encoder.parameters())
optimizer = torch.optim.AdamW(trained[:1] if "groups" in WHAT else trained, lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
counter, average, places = Counter(), Average(core), Passes() if "passes" in WHAT else Places()
loader = torch.utils.data.DataLoader(Data(), batch_size=4, sampler=places)
samples = {"loader": loader} if {"sampler", "accumulate"} & {*WHAT} else {}
more = {"places": places} if "sampler" in WHAT else {}
own = {"places": places} if "accumulate" in WHAT else {}
torch.manual_seed(1 + rank)
link = read_link()

with rt.Session(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    state={"counter": counter, "average": average, **more},
    rank_state=own,
    **samples,
) as session:
    if asked.save:
        session.save_every(steps=asked.save)
    for step in session.steps(asked.steps):
        core.now = bool({"momentum", "assigned", "silent", "replaced"} & {*WHAT}) or (
            "rarely" in WHAT and step.number == asked.rare
        )
        if "average" in WHAT:
            average.update(core)
        if "rate" in WHAT:
            scheduler.step()
        if "groups" in WHAT and step.number >= 6 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": trained[1:], "lr": 0.1})
        with step:
            inputs = torch.randn(4, 40) if step.batch is None else step.batch
            counter.array[step.number] += "array" in WHAT
            if "counter" in WHAT:
                counter.samples += len(inputs)
                counter.recent.append(torch.full((3,), float(step.number)))
            (model(inputs) - 1).pow(2).mean().backward()
            if "accumulate" not in WHAT or step.number % 2:
                optimizer.step()
                model.zero_grad()  # of all: the bias has gradients before it is in the optimizer
            if "counter" in WHAT or "rate" in WHAT:
                average.update(core)
        if "decay" in WHAT:
            with torch.no_grad():
                for parameter in core.parameters():
                    parameter.mul_(0.99)
        if "behind" in WHAT:
            average.update(core)
            scheduler.step()
        if step.number == asked.all_die and link is not None and link.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)

if link is not None:
    found = hashlib.sha256()
    counted = [*counter.recent, torch.from_numpy(counter.array)]
    held = [*core.state_dict().values(), *average.held, *counted, torch.get_rng_state()]
    for tensor in held:
        found.update(tensor.detach().numpy().tobytes())
    found.update(repr((average.updates, counter.samples, places.place, scheduler.state_dict())).encode())
    Path(link.run_dir, f"end_rank{rank}.txt").write_text(found.hexdigest())
dist.destroy_process_group()
