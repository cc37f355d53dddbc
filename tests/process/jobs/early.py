"""A script that a standby runs ahead, for ``early_agent.py``: ``early.py MODE_FILE SCRATCH``.

The mode file says what it does that a process without a rank must not, or what it may do, and where: ``WHAT@group`` or
``WHAT@point``, before the line of that name.
"""

import atexit
import contextlib
import ctypes.util
import io
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
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
kept = open  # a script may keep what is watched for now


def forked(work) -> None:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    os.waitpid(pid, 0)


def mine() -> None:
    path = scratch / f"mine-{os.getpid()}"
    path.write_text("one")
    path.write_text("two")
    path.rename(f"{path}.new")
    Path(f"{path}.new").unlink()


def temporary() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "deep" / "er").mkdir(parents=True)
        torch.save(1, f"{folder}/deep/saved")
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"1")


def stop_at_nothing() -> None:
    with contextlib.suppress(BaseException):
        os.environ["LOCAL_RANK"]


def programs_of_python() -> None:
    platform.processor()
    ctypes.util.find_library("c")


def set_rank() -> None:
    os.environ["RANK"] = "0"


def set_another() -> None:
    os.environ["NCCL_DEBUG"] = "WARN"


def session() -> None:
    rt.Session(model=nn.Linear(1, 1), optimizer=[])


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
    "program": lambda: subprocess.run(["true"], check=True),
    "shell": lambda: os.system("true"),
    "overwrite": lambda: (scratch / "there").write_text(""),
    "remove": (scratch / "there").unlink,
    "save": lambda: torch.save(1, scratch / "there"),
    "remove all": lambda: shutil.rmtree(scratch / "tree"),
    "spawn": lambda: multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,)).start(),
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
    "session": session,
    "mine": mine,
    "temporary": temporary,
    "append": lambda: (scratch / "there").open("a").close(),
    "programs of Python": programs_of_python,
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
rt.standby_point()
hook = sys.excepthook
told = {
    "rank": [dist.get_rank(), dist.group.WORLD.rank(), int(os.environ["RANK"]), os.environ["LOCAL_RANK"]],
    "sampler": DistributedSampler(range(4)).rank,
    "size": dist.get_world_size(),
    "environ": type(os.environ).__name__,
    "doors": [open is not io.open, hasattr(os.remove, "__wrapped__"), hasattr(subprocess._fork_exec, "__wrapped__")],
    "hook": hook.__closure__[hook.__code__.co_freevars.index("excepthook_prefix")].cell_contents,
    "set": os.environ.get("NCCL_DEBUG"),
    "sockets": sum(
        str(each.readlink()).startswith("socket:") for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
    ),
}
with kept(scratch / "there", "w") as file:
    file.write("a rank may")
print(json.dumps(told))
atexit.register(print, "the end")
if mode == "raise as a rank":
    raise ValueError("as a rank")
