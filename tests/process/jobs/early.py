"""A script that a standby runs ahead, for ``early_agent.py``: ``early.py MODE_FILE SCRATCH``.

The mode file says what it does that a process without a rank must not, or what it may do, and where: ``WHAT@group`` or
``WHAT@point``, before the line of that name.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

import resilient_train as rt

mode_file, scratch = map(Path, sys.argv[1:3])
mode = mode_file.read_text()


def forked(work) -> None:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    os.waitpid(pid, 0)


def stop_at_nothing() -> None:
    with contextlib.suppress(BaseException):
        os.environ["LOCAL_RANK"]


def set_rank() -> None:
    os.environ["RANK"] = "0"


def set_another() -> None:
    os.environ["NCCL_DEBUG"] = "WARN"


DOES = {
    "get": lambda: os.environ.get("RANK"),
    "getenv": lambda: os.getenv("LOCAL_RANK", "0"),
    "contains": lambda: "RANK" in os.environ,
    "copy": lambda: dict(os.environ),
    "bytes": lambda: os.environb[b"RANK"],
    "set": set_rank,
    "library": dist.get_node_local_rank,
    "suppressed": stop_at_nothing,
    "child reads": lambda: forked(lambda: os.environ["RANK"]),
    "file": lambda: (scratch / "made ahead").write_text("by a standby"),
    "child lives": lambda: (
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
    ),
    "raise": lambda: {}["missing"],
    "exit": lambda: sys.exit(3),
    "die": lambda: os._exit(4),
    "slow": lambda: time.sleep(60),
    "rank": dist.get_rank,
    "sampler": lambda: DistributedSampler(range(4)),
    "new group": lambda: dist.new_group([0, 1]),
    "objects": lambda: dist.broadcast_object_list([1]),
    "lock": lambda: multiprocessing.get_context("spawn").Lock(),
    "fork that ends": lambda: forked(lambda: None),
    "set another": set_another,
}


def come_to(place: str) -> None:
    what, _, where = mode.partition("@")
    if where == place and what in DOES:
        DOES[what]()


def warm_up(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()


print("a banner")
come_to("group")
dist.init_process_group()
come_to("point")
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
optimizer = torch.optim.AdamW(model.parameters())
if mode == "warm":
    warm_up(model)
if mode == "end":
    sys.exit()
if mode == "no point":
    with contextlib.suppress(Exception):  # there is no agent behind the socket that it is told
        rt.Session(model=model, optimizer=optimizer)
else:
    rt.standby_point()
hook = sys.excepthook
told = {
    "rank": [dist.get_rank(), dist.group.WORLD.rank(), int(os.environ["RANK"]), os.environ["LOCAL_RANK"]],
    "sampler": DistributedSampler(range(4)).rank,
    "size": dist.get_world_size(),
    "environ": type(os.environ).__name__,
    "hook": hook.__closure__[hook.__code__.co_freevars.index("excepthook_prefix")].cell_contents,
    "set": os.environ.get("NCCL_DEBUG"),
    "sockets": sum(
        str(each.readlink()).startswith("socket:") for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
    ),
}
print(json.dumps(told))
atexit.register(print, "the end")
if mode == "raise as a rank":
    raise ValueError("as a rank")
