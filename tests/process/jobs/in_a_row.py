"""Several runs of plain torch, one after the other, for torchrun: what they import is imported once.

``in_a_row.py COMMANDS``: a JSON list of scripts with their arguments. Each runs in a fork of the rank, which has used
nothing of torch yet, and has keys of its own in torchrun's store.
"""

import functools
import importlib
import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

# Stock gloo waits for the GIL, and whoever has that for gloo: docs/facts.md.
torch._C._stash_obj_in_tls = lambda *_: None
for each in ("torch._dynamo", *(f"torch.distributed.{name}" for name in ("fsdp", "pipelining", "tensor.parallel"))):
    importlib.import_module(each)


def run(number: int, command: list[str]) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    own = dist.PrefixStore(str(number), shared)
    dist.init_process_group = functools.partial(dist.init_process_group, store=own, rank=rank, world_size=size)
    sys.argv[:] = command
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # torch's tables are not taken down, as in ``server.py``


for place, command in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        run(place, command)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))  # so torchrun says by which signal
    if status:
        sys.exit(f"{' '.join(command)} failed")
