"""A loop that uses groups of its own in the body: a 2x2 DeviceMesh, a new_group, functional and object collectives. One
group is destroyed in the loop, by its members at different times.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

dist.init_process_group("resilient")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
pair = dist.new_group([0, 3])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8), process_group=dist.group.WORLD)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
torch.manual_seed(dist.get_rank())
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(8):
        with step:
            loss = model(torch.randn(4, 8)).square().mean()
            share = loss.detach().clone()
            dist.all_reduce(share, group=mesh["outer"].get_group())
            share = functional.all_reduce(share, "sum", mesh["inner"].get_group()).wait()
            if dist.get_rank() in (0, 3) and step.number < 3:
                dist.all_reduce(torch.ones(1), group=pair)
            if (dist.get_rank(), step.number) in {(3, 3), (0, 4)}:
                dist.destroy_process_group(pair)
            told: list = [None] * dist.get_world_size()
            dist.all_gather_object(told, {"rank": dist.get_rank(), "step": step.number})
            assert [each["rank"] for each in told] == [0, 1, 2, 3]
            (loss / share).backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
