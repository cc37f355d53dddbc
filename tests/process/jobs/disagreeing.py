"""Ranks that call different collectives at one place, as ``mode`` says; each would hang, or end its process, by itself.

``never``: all call the same. ``once``: rank 1 another one in step 5, the first time (as the clock would have it).
``always``: each time. ``sizes``: another size. ``backward``: in a hook of a backward pass. ``part``: in a group of two.
``tail``: behind the update. ``extra``: one more, as the last of the body. ``counter``: one more at times, by a counter
that a new process begins anew. ``refused``: rank 1 alone makes one that the library refuses, then takes its time.
``uneven``: all verbs that may differ between members do.
"""

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

mode, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
core = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
model = DistributedDataParallel(core)
optimizer = torch.optim.AdamW(core.parameters(), lr=1e-2)
part = dist.new_group([0, size - 1])
torch.manual_seed(1 + rank)
calls = 0


def is_other(step: rt.Step) -> bool:
    return rank == size - 1 and step.number == 5 and mode != "never" and (mode != "once" or step.attempt == 0)


def call(value: torch.Tensor, *, other: bool, group: dist.ProcessGroup | None = None) -> None:
    if not other:
        dist.all_reduce(value.clone(), group=group)
    elif mode == "sizes":
        dist.all_reduce(torch.cat([value.flatten()] * 2), group=group)
    else:
        dist.broadcast(value.clone(), 0, group=group)


def call_unevenly(step: int) -> None:
    """What may differ between members does, and comes out right."""
    sizes = [1 + (member + step) % 3 for member in range(size)]
    given = torch.full((sum(sizes),), float(rank))
    taken = torch.zeros(size * sizes[rank])
    dist.all_to_all_single(taken, given, [sizes[rank]] * size, sizes)
    assert taken.tolist() == [float(member) for member in range(size) for _ in range(sizes[rank])]
    parts = [torch.zeros(2) for _ in range(size)] if rank == step % size else None
    dist.gather(torch.full((2,), float(rank)), parts, dst=step % size)
    mine = torch.zeros(3)
    dist.scatter(mine, [torch.full((3,), 1.0 + each) for each in range(size)] if parts else None, src=step % size)
    assert mine.tolist() == [1.0 + rank] * 3
    found: list[object] = [None] * size
    dist.all_gather_object(found, "x" * (1 + rank + step))
    assert [len(str(each)) for each in found] == [1 + member + step for member in range(size)]
    named: list[object] = ["y" * step] if rank == 0 else [None]
    dist.broadcast_object_list(named, 0)
    assert named == ["y" * step]
    dist.monitored_barrier()


with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(steps):
        with step:
            other = is_other(step)
            loss = model(torch.randn(8, 6)).pow(2).mean()
            value = loss.detach()
            if mode == "backward":
                loss.register_hook(lambda gradient, other=other: call(gradient, other=other))
            if mode == "uneven":
                call_unevenly(step.number)
            if mode in ("never", "once", "always", "sizes"):
                call(value, other=other)
            if mode == "part" and rank in (0, size - 1):
                call(value, other=other, group=part)
            loss.backward()
            if mode == "refused" and step.number == 5 and not other:
                time.sleep(1)
            if mode == "refused" and other:
                with contextlib.suppress(RuntimeError, ValueError, IndexError):
                    dist.all_gather([torch.zeros(2) for _ in range(size)], torch.zeros(3))
                    raise AssertionError("it was taken")
                time.sleep(4)  # the others wait to update
            if mode == "extra" and other:
                dist.all_reduce(value.clone())
            dist.all_reduce(value)
            calls += 1
            if mode == "counter" and calls % 8 == 0:
                dist.all_reduce(torch.ones(3))
            optimizer.step()
            optimizer.zero_grad()
        if step.done and mode == "tail":
            call(value, other=is_other(step))
