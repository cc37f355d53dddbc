"""Calls and exceptions where a fault could not be repaired, or a work be waited for, named by ``mode``.

``caught``: an exception of a body is caught outside of it. ``caught-behind``: one that came behind the update.
``in-front``: a collective in front of ``with step:``. ``sampler``: a sampler that communicates. ``thread``: a thread of
the user's does. ``objects``: collectives of objects behind ``with step:``. ``forward``: a forward pass of DDP's there.
``messages``: messages and barriers there. ``anybody``: messages from any source, behind bodies without an update.
``any-source``: one in a body. ``wraps``: a model is wrapped anew in the loop.
"""

import argparse
import threading
from collections.abc import Iterator
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("steps", type=int)
asked = parser.parse_args()
mode = asked.mode


class Agreed(Sampler):
    """All ranks take the order that rank 0 draws."""

    def __iter__(self) -> Iterator[int]:
        seed = torch.randint(1000, (1,))
        dist.broadcast(seed, 0)
        return iter(torch.randperm(32, generator=torch.Generator().manual_seed(int(seed))).tolist())

    def __len__(self) -> int:
        return 32


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
aside = dist.new_group()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + rank)
loader = DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=4, sampler=Agreed()) if mode == "sampler" else None


def one_step(step: rt.Step) -> None:
    model(torch.randn(4, 6)).pow(2).mean().backward()
    if mode == "caught" and step.number == 3:
        raise ValueError("out of memory, say")
    if mode == "any-source":
        got = torch.zeros(1)
        if rank == 0:
            assert dist.recv(got) == 1
        elif rank == 1:
            dist.send(torch.ones(1), 0)
    if mode == "anybody" and step.number % 2 == 0:
        return
    optimizer.step()
    optimizer.zero_grad()
    if mode == "caught-behind" and step.number == 3:
        raise ValueError("the log is full, say")


UNPICKLED = {"weights_only": True} if "weights_only" in signature(dist.send_object_list).parameters else {}
"""From torch 2.15 on objects go in another form where that is wanted."""


def objects_behind(step: rt.Step) -> None:
    """All say what they have, and are given it."""
    mine, sent, got = ["mine", rank], [f"sent {rank}"], [None]
    dist.broadcast_object_list(sent, src=0)
    dist.scatter_object_list(got, [f"part {each}" for each in range(size)] if rank == 0 else None, src=0, **UNPICKLED)
    every = [None] * size
    dist.all_gather_object(every, mine)
    dist.gather_object(mine, [None] * size if rank == 0 else None, dst=0)
    if rank == 1:
        dist.send_object_list([mine], dst=0, **UNPICKLED)
    elif rank == 0:
        taken = [None]
        dist.recv_object_list(taken, src=1, **UNPICKLED)
        assert not step.done or taken == [["mine", 1]], taken
    if step.done:
        assert (sent, got) == (["sent 0"], [f"part {rank}"]), (sent, got)
    else:
        print(f"alone {rank}: {sent} {got}", flush=True)


def messages_behind(step: rt.Step) -> None:
    """In a ring."""
    before, behind = (rank - 1) % size, (rank + 1) % size
    mine, got = torch.full((2,), float(rank)), torch.zeros(2)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, behind), dist.P2POp(dist.irecv, got, before)]):
        work.wait()
    assert not step.done or got[0] == before
    sent, taken = dist.isend(mine, behind), dist.irecv(got, before)
    taken.wait()
    sent.wait()
    assert taken.source_rank() == before
    dist.barrier()
    dist.monitored_barrier()


def anybody_behind(step: rt.Step) -> None:
    """To rank 0, from whoever comes first."""
    if rank:
        dist.send(torch.full((1,), float(rank)), 0)
        return
    sources = [dist.recv(torch.zeros(1)) for _ in range(size - 1)]
    assert 0 not in sources
    assert not step.done or sorted(sources) == [*range(1, size)]


failures: list[str] = []


def log_aside() -> None:
    try:
        dist.all_reduce(torch.ones(1), group=aside)
    except Exception as error:
        failures.append(f"{type(error).__name__}: {error}")


with rt.Session(model=model, optimizer=optimizer, loader=loader) as session:
    for step in session.steps(asked.steps):
        if mode == "in-front" and step.number == 2:
            dist.all_reduce(torch.ones(1))
        try:
            with step:
                one_step(step)
        except ValueError as error:
            print(f"caught {error}", flush=True)
        if mode == "objects":
            objects_behind(step)
        if mode == "wraps":
            DistributedDataParallel(nn.Linear(6, 3))
            if step.number == 2:
                DistributedDataParallel(model.module)
        if mode == "messages":
            messages_behind(step)
        if mode == "anybody" and step.number % 2 == 0:
            anybody_behind(step)
        if mode == "forward":
            model(torch.randn(4, 6))
        if mode == "thread":
            thread = threading.Thread(target=log_aside, name="logs")
            thread.start()
            thread.join()
            if failures:
                raise SystemExit(failures[0])
