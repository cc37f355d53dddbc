"""A user's module, imported by a script that names resilient_train nowhere itself."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    import resilient_train as rt

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rt.Session(model=model, optimizer=optimizer) as session:
        for step in session.steps(3):
            with step:
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()
