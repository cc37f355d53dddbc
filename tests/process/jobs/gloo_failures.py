"""Rank 0 meets every way in which a gloo collective fails, each in a group of its own; prints what it takes it for.

Argument: a port. Rank 1, a fork that has no group yet, is the peer that brings the failures about.
"""

import datetime as dt
import json
import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import resilient_train  # noqa: F401 - makes the backend known
from resilient_train.frameworks.torch.communication import process_group as group_module
from resilient_train.frameworks.torch.communication.process_group import ResilientGroup, groups

KINDS = ("healthy", "timeout", "shut", "death")
"""A collective of unlike sizes is not among them: gloo ends the process over it (std::terminate)."""


class Watcher:
    """What the engine is while a Session runs."""

    def issue(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
        return group.run(verb, args)

    def compare(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
        pass

    def take_back(self, group: ResilientGroup) -> None:
        pass


def provoke(kind: str, group: ResilientGroup) -> None:
    if kind == "timeout":
        return  # never comes
    if kind == "shut":
        for descriptor, _ in group.sockets:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    elif kind == "death":
        os._exit(0)
    else:
        dist.all_reduce(torch.ones(3), group=group)


rank = int(os.fork() == 0)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK=str(rank), WORLD_SIZE="2")
dist.init_process_group("resilient", timeout=dt.timedelta(seconds=60))
made = {kind: dist.new_group(backend="resilient", timeout=dt.timedelta(seconds=1)) for kind in KINDS}
group_module.watch(Watcher())
found = {}
for kind, group in made.items():
    assert group in groups.values()
    dist.barrier()
    if rank == 1:
        try:
            provoke(kind, group)
        except RuntimeError as error:
            print(f"the peer, {kind}: {error}", file=sys.stderr)
        continue
    try:
        dist.all_reduce(torch.ones(3), group=group)
        if kind == "healthy":
            raise RuntimeError("Connection closed by peer, says the user's own code")
        found[kind] = "no error"
    except RuntimeError:
        # A peer's death is an error here before the kernel has closed all that was the peer's.
        end = time.monotonic() + 5
        while kind != "healthy" and not group.broken() and time.monotonic() < end:
            time.sleep(0.001)
        found[kind] = "broken" if group.broken() else "intact"
if rank == 0:
    assert not dist.group.WORLD.broken() or "death" in found
    print(json.dumps(found), flush=True)
    os._exit(0)
