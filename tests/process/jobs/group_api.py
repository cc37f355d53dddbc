"""What torch.distributed answers about a group, and does with it, as JSON: once with stock gloo and once with ours.

``group_api.py FILE BACKEND``; rank 0 of two writes FILE.
"""

import datetime as dt
import json
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import resilient_train  # noqa: F401 - in both runs; it does nothing without an agent

warnings.simplefilter("ignore")
asked = None if sys.argv[2] == "none" else sys.argv[2]
dist.init_process_group(asked, timeout=dt.timedelta(seconds=40))
RANK = dist.get_rank()
OTHER = 1 - RANK
WORLD: Any = dist.group.WORLD
CPU = torch.device("cpu")
backend = WORLD._get_backend(CPU)
made = {
    "none": dist.new_group([0, 1]),
    "gloo": dist.new_group([0, 1], backend="gloo", group_desc="dp"),
    "map": dist.new_group([0, 1], backend="cpu:gloo", timeout=dt.timedelta(seconds=30)),
    "local": dist.new_group([0, 1], use_local_synchronization=True),
    "alone": dist.new_group([RANK], use_local_synchronization=True),
}
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
overridden = init_device_mesh("cpu", (2,), mesh_dim_names=("outer",), backend_override={"outer": "gloo"})


def given(*shape: int) -> torch.Tensor:
    return torch.ones(*shape) * (RANK + 1)


def coalesced(device: Any = None) -> list[Any]:
    tensors = [given(2), given(3)]
    with dist._coalescing_manager(WORLD, device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return tensors


def filled(verb: Callable[..., Any], *args: Any, size: int) -> torch.Tensor:
    output = torch.zeros(size)
    verb(output, *args)
    return output


def batch() -> torch.Tensor:
    received = torch.zeros(2)
    ops = [dist.P2POp(dist.isend, given(2), OTHER), dist.P2POp(dist.irecv, received, OTHER)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def from_any() -> Any:
    if RANK == 1:
        return dist.send(given(2), 0)
    received = torch.zeros(2)
    return dist.recv(received), received


def objects() -> list[Any]:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": RANK})
    told = [RANK]
    dist.broadcast_object_list(told, src=1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, ["a", "b"] if RANK == 0 else None)
    sent = [RANK]
    (dist.send_object_list if RANK == 0 else dist.recv_object_list)(sent, OTHER)
    return [gathered, told, scattered, sent]


def work_api() -> list[Any]:
    tensor = given(2)
    work = dist.all_reduce(tensor, async_op=True)
    return [work.wait(dt.timedelta(seconds=20)), work.is_completed(), work.get_future().wait(), work.result()]


def message_api() -> list[Any]:
    works = [dist.isend(given(2), OTHER), dist.irecv(torch.zeros(2), OTHER)]
    return [[work.wait() for work in works], [work.is_completed() for work in works]]


def new_timeout() -> list[Any]:
    c10d._set_pg_timeout(dt.timedelta(seconds=33), made["none"])
    made["map"].set_timeout(dt.timedelta(seconds=34))
    return [str(made[name]._get_backend(CPU).options._timeout) for name in ("none", "map")]


def wrapped() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model(given(1, 2)).sum().backward()
    return model.module.weight.grad


def group_verbs() -> list[torch.Tensor]:
    """Of the group itself, as only it takes them."""
    one, two, three, output = given(2), given(2), given(2), torch.zeros(2)
    WORLD.broadcast(one, 1).wait()
    WORLD.allreduce(two, dist.ReduceOp.MAX).wait()
    WORLD.reduce(three, root=1).wait()
    WORLD.scatter(output, [given(2), given(2) + 5] if RANK == 0 else [], root=0).wait()
    outputs = [torch.zeros(2), torch.zeros(2)]
    WORLD.allgather(outputs, given(2)).wait()
    return [one, two, three if RANK == 1 else given(1), output, *outputs]


QUESTIONS: dict[str, Callable[[], Any]] = {
    "backend": lambda: [dist.get_backend(), dist.get_backend_config(), WORLD.name(), WORLD._get_backend_name()],
    "backends": lambda: {name: [dist.get_backend(each), dist.get_backend_config(each)] for name, each in made.items()},
    "recorded": lambda: [c10d._world.pg_map[WORLD][0], c10d._world.pg_config_info[0]["backend_config"]],
    "names": lambda: [[each.group_name, each.group_desc] for each in (WORLD, *made.values())],
    "ranks": lambda: [
        [each.rank(), each.size(), dist.get_process_group_ranks(each)] for each in (WORLD, *made.values())
    ],
    "other ranks": lambda: [dist.get_global_rank(made["gloo"], 1), dist.get_group_rank(made["gloo"], 1)],
    "devices": lambda: [str(WORLD._device_types), str(c10d._get_pg_default_device(WORLD)), WORLD.bound_device_id],
    "for objects": lambda: [str(c10d._get_object_coll_device(WORLD)), str(c10d._device_capability(WORLD))],
    "backend itself": lambda: [type(backend).__name__, backend.name(), backend.rank(), backend.size()],
    "supports": lambda: [backend.supports_splitting, backend.supports_coalescing, backend.supports_time_estimate],
    "hooks": lambda: [WORLD._has_hooks(), WORLD.use_pg_for_symm_mem_rendezvous],
    "hook": lambda: WORLD._register_on_completion_hook(print),
    "timing": WORLD._enable_collectives_timing,
    "store": lambda: type(WORLD.get_group_store()).__name__,
    "sequence": lambda: type(WORLD._get_sequence_number_for_group()).__name__,
    "resolved": lambda: c10d._resolve_process_group(WORLD.group_name) is WORLD,
    "kinds": lambda: [
        isinstance(WORLD, dist.ProcessGroup),
        isinstance(hash(WORLD), int),
        weakref.ref(WORLD)() is WORLD,
    ],
    "timeouts": new_timeout,
    "barrier": lambda: [dist.barrier(), dist.barrier(device_ids=[0]), dist.barrier(async_op=True).wait()],
    "monitored": lambda: dist.monitored_barrier(made["gloo"], dt.timedelta(seconds=20), wait_all_ranks=True),
    "monitored by itself": WORLD.monitored_barrier,
    "monitored without a word": dist.monitored_barrier,
    "subgroups": lambda: [dist.new_subgroups(1)[0].size(), dist.new_subgroups_by_enumeration([[0, 1]])[0].size()],
    "not a member": lambda: dist.get_rank(dist.new_group([1])) if RANK == 0 else dist.new_group([1]).rank(),
    "mesh": lambda: [mesh["outer"].get_group().size(), mesh["inner"].get_group().size(), overridden.get_group().name()],
    "flat mesh": lambda: mesh._flatten("all").size(),
    "all_reduce_coalesced": lambda: (dist.all_reduce_coalesced(tensors := [given(2), given(3)]), tensors),
    "coalescing": coalesced,
    "all_gather": lambda: filled(dist.all_gather_into_tensor, given(2), size=4),
    "reduce_scatter": lambda: filled(dist.reduce_scatter_tensor, given(4), size=2),
    "all_to_all": lambda: filled(dist.all_to_all_single, given(4), size=4),
    "functional": lambda: [
        functional.all_reduce(given(2), "sum", WORLD) + 0,
        functional.all_reduce(given(2), "max", [0, 1]) + 0,
        functional.all_gather_tensor(given(2), 0, WORLD) + 0,
        functional.reduce_scatter_tensor(given(2), "sum", 0, WORLD) + 0,
        functional.all_to_all_single(given(2), [1, 1], [1, 1], WORLD) + 0,
        functional.broadcast(given(2), 1, WORLD) + 0,
        functional.all_reduce_coalesced([given(2)], "sum", mesh["outer"].get_group())[0] + 0,
        functional.all_gather_into_tensor_coalesced([given(2)], WORLD)[0] + 0,
        functional.reduce_scatter_tensor_coalesced([given(2)], "sum", [0], WORLD)[0] + 0,
    ],
    "group's own": group_verbs,
    "batch": batch,
    "from any": from_any,
    "objects": objects,
    "work": work_api,
    "messages": message_api,
    "sparse": lambda: (dist.all_reduce(tensor := torch.eye(2).to_sparse()), tensor.to_dense()),
    "complex": lambda: (dist.all_reduce(tensor := torch.ones(2, dtype=torch.complex64)), torch.view_as_real(tensor)),
    "DDP": wrapped,
    "destroyed": lambda: dist.destroy_process_group(made["map"]),
    "split_group": lambda: dist.split_group(split_ranks=[[0], [1]]),
    "split": lambda: WORLD.split_group([0]).size(),
    "options": lambda: dist.new_group([0, 1], backend="gloo", pg_options=dist.ProcessGroupGloo._Options()).size(),
    "coalescing by a device": lambda: coalesced(CPU),
}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


answers = {}
for question, ask in QUESTIONS.items():
    try:
        answers[question] = plain(ask())
    except Exception as error:
        answers[question] = f"{type(error).__name__}: {error}"
dist.barrier()
if RANK == 0:
    Path(sys.argv[1]).write_text(json.dumps(answers))
sys.stdout.flush()
os._exit(0)
