"""A loop whose environment and arguments are not UTF-8, and the names of the files it is at; nobody reads them but
itself.
"""

import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

assert os.environ["TORCHELASTIC_ODD"] == sys.argv[1] == "caf\udce9", (ascii(os.environ["TORCHELASTIC_ODD"]), sys.argv)


class Files:
    """A place in a list of files."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place, "name": f"{sys.argv[1]} {self.place}"}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.place = int(str(state["name"]).removeprefix(sys.argv[1]))
        assert self.place == state["place"]


dist.init_process_group("gloo")
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shared, own = Files(), Files()
with rt.Session(model=model, optimizer=optimizer, state={"shared": shared}, rank_state={"own": own}) as session:
    session.save_every(steps=2)
    for step in session.steps(6):
        with step:
            shared.place += 1
            own.place += 1
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
