"""A script with words of its own in torch's store: each process of a rank adds one, and makes a group of all ranks."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

dist.init_process_group()
store = dist.distributed_c10d._get_default_store()
rank = dist.get_rank()
store.set(f"mine/{rank}/{store.add(f'count/{rank}', 1)}", str(os.getpid()))
store.wait([f"mine/{other}/1" for other in range(dist.get_world_size())])
others = dist.new_group(list(range(dist.get_world_size())))
dist.distributed_c10d._world.pg_map[others][1].set(f"of the group {rank}", "here")
model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=others)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(6):
        with step:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
count = store.add(f"count/{rank}", 0)
told = [int(store.get(f"mine/{rank}/{number}")) == os.getpid() for number in range(1, count + 1)]
print(f"rank {rank}: {told} {len(store.list_keys())}")
dist.barrier()
dist.destroy_process_group()
