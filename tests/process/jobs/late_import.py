"""A job that communicates before it imports resilient_train."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
count = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(count)
print("COUNT", dist.get_rank(), count.item(), flush=True)

import resilient_train as rt  # noqa: E402 - that is the story

torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(6):
        with step:
            (model(torch.ones(8, 16)).square().sum() * count.item()).backward()
            optimizer.step()
            optimizer.zero_grad()
