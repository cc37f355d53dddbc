"""A program can ask our group all that it can ask one of torch's own, and gets the same answers."""

import ast
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from running import JOBS, LAUNCHER, start

REFUSED = {
    "split": "UsageError: a part that is split from a group can't be rebuilt after a fault: use dist.new_group(ranks)",
    "options": "UsageError: pg_options (_Options) can't be kept for a group that is rebuilt after a fault: leave them "
    "out",
    "merge_remote_group": "UsageError: a group that is merged from two can't be rebuilt after a fault: use "
    "dist.new_group(ranks)",
    "supports what is newer": [False, False],
    "window": "UsageError: a window of a group can't be rebuilt after a fault",
    **dict.fromkeys(
        ("pre hook", "post hook", "abort hook"),
        "UsageError: a hook of a group that is rebuilt after a fault would be lost with the connections",
    ),
    **dict.fromkeys(
        ("reconfigure", "reconfigure handle"),
        "UsageError: this group is rebuilt after a fault by itself: it can't be reconfigured by others",
    ),
}
"""What torch does, or tries, and we can't keep over a recovery."""
REFUSED_OF_NEWEST = {"split_group": REFUSED["split"]}
"""Before torch 2.15 it split no group that was not bound to a device."""
OWNERS = ("torch.distributed", "the group")
MISTAKES = {
    "coalescing by a device",
    "hook",
    "initialized twice",
    "itself, of torch.distributed",
    "merge_remote_group",
    "no list, of torch.distributed",
    "no tensor, of the group",
    "no tensor, of torch.distributed",
    "root without a list, of torch.distributed",
    "shrink_group, of torch.distributed",
    "split_group",
    "wrong parts, of torch.distributed",
    "wrong root, of the group",
    "wrong shapes, of the group",
    "wrong type, of the group",
}
"""Questions that a stock group answers with an error. All others have an answer."""
MISTAKES_OF_NEWER = {
    *(f"{verb}, of {whose}" for verb in ("gather_single", "gather_into_tensor") for whose in OWNERS),
    *("window", "reconfigure", "abort hook"),
}
"""What gloo has no answer for in torch 2.14."""
NOT_ASKED = {
    "asks no group: addresses and stores, before there is one": "FileStore PrefixStore Store TCPStore "
    "register_rendezvous_handler rendezvous",
    "asks no group: a switch of the process": "DebugLevel get_debug_level set_debug_level set_debug_level_from_env",
    "asks no group: a debugger, which waits for somebody": "breakpoint",
    "another module's name, imported there": "Logger log timedelta",
    "an exception; which one is raised, the questions compare": "DistBackendError DistError DistNetworkError "
    "DistStoreError QueueEmptyError",
    "a type for annotations, or that of a result": "DeviceMesh GroupName RankType Work",
    "an older name of ReduceOp": "reduce_op",
    "parts of DDP, which `DDP` asks": "BuiltinCommHookType GradBucket Reducer",
}
"""Reason -> names of torch.distributed."""
OF_SOME_BUILDS = {f"ProcessGroup{name}" for name in ("MPI", "NCCL", "NCCL2", "NCCLLazy", "UCC", "XCCL")}
"""Backends that a group of ours is never asked for: they are refused."""


NEWER = hasattr(dist, "gather_single")
"""torch 2.14, or later."""
_HOOKS = (f"{do}_{when}_hook" for do in ("register", "unregister") for when in ("pre", "post", "abort"))
OF_NEWER = {"gather_single", "gather_into_tensor", "get_backend", "new_window", "supports_window", *_HOOKS}
OF_NEWER |= {"reconfigure", "get_reconfigure_handle", "supports_reconfigure"}
"""What its groups have, and those of torch 2.13 do not."""
OF_NEWEST = {"supports_abort_hooks", "supports_completion_hooks"}
NEWEST = hasattr(dist.ProcessGroup, "supports_abort_hooks")
"""torch 2.15, or later: its groups have these."""


def answers(command: list[str], file: Path, backend: str) -> dict[str, Any]:
    with start([*command, "--nproc-per-node", "2", str(JOBS / "group_api.py"), str(file), backend]) as process:
        _, err = process.communicate(timeout=100)
    assert file.exists(), err
    # A stock group of gloo's takes tensors of a GPU as well, where torch was built for one; ours does not.
    text = file.read_text()
    for said in (",cuda:gloo", "device(type='cuda'), ", "'cuda', "):
        text = text.replace(said, "")
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", [pytest.param("none", marks=pytest.mark.long), "gloo"])
def test_the_answers_are_those_of_a_stock_group(tmp_path: Path, backend: str) -> None:
    stock = answers([sys.executable, "-m", "torch.distributed.run"], tmp_path / "stock.json", backend)
    ours = answers([*LAUNCHER, "--run-dir", str(tmp_path / "run")], tmp_path / "ours.json", backend)
    wrong = {question for question, answer in stock.items() if re.match(r"\w+Error: ", str(answer))}
    # Stock torch doesn't find gloo behind a default group whose backend nobody has named.
    mistakes = MISTAKES | (MISTAKES_OF_NEWER if NEWER else {"monitored without a word"} if backend == "none" else set())
    if NEWEST:
        mistakes -= REFUSED_OF_NEWEST.keys()
    assert wrong == mistakes, {question: stock[question] for question in wrong - mistakes}
    refused = REFUSED | (REFUSED_OF_NEWEST if NEWEST else {})
    for question, answer in stock.items():
        assert ours[question] == refused.get(question, answer), question


def asked_of(*owners: str) -> set[str]:
    """The attributes of these that the questions use."""
    nodes = ast.walk(ast.parse((JOBS / "group_api.py").read_text()))
    found = (node for node in nodes if isinstance(node, ast.Attribute))
    return {node.attr for node in found if re.sub(r"\[.*]", "[]", ast.unparse(node.value)) in owners}


def test_every_name_of_torch_distributed_is_asked_or_it_says_why_not() -> None:
    """So a new version of torch is looked through. Nothing stands here that is not there any more."""
    kinds = {name: type(value) for name, value in vars(dist).items()}  # isinstance() would warn of a deprecated one
    public = {name for name in kinds if not name.startswith("_") and not issubclass(kinds[name], ModuleType)}
    why_not = " ".join(NOT_ASKED.values()).split()
    asked = asked_of("dist") & public
    assert public - OF_SOME_BUILDS == asked | set(why_not), sorted((public - OF_SOME_BUILDS) ^ (asked | set(why_not)))
    assert len(why_not) == len(set(why_not)), "twice"
    assert not asked & set(why_not), "asked, and said not to be"


def test_every_attribute_of_a_group_is_asked() -> None:
    public = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")}
    asked = {name for name in asked_of("WORLD", "each", "made[]", "dist.ProcessGroup") if not name.startswith("_")}
    missing = (set() if NEWER else OF_NEWER) | (set() if NEWEST else OF_NEWEST)
    assert public == asked - missing
