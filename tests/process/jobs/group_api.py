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

import resilient_train  # noqa: F401 - in both runs; it does nothing without an agent

warnings.simplefilter("ignore")
asked = None if sys.argv[2] == "none" else sys.argv[2]
dist.init_process_group(asked, timeout=dt.timedelta(seconds=40))
RANK = dist.get_rank()
OTHER = 1 - RANK
WORLD: Any = dist.group.WORLD
CPU = torch.device("cpu")
SHORT, LONG = dt.timedelta(seconds=0.05), dt.timedelta(seconds=20)
backend = WORLD._get_backend(CPU)
made = {
    "none": dist.new_group([0, 1]),
    "gloo": dist.new_group([0, 1], backend="gloo", group_desc="dp"),
    "map": dist.new_group([0, 1], backend="cpu:gloo", timeout=dt.timedelta(seconds=30)),
    "local": dist.new_group([0, 1], use_local_synchronization=True),
    "alone": dist.new_group([RANK], use_local_synchronization=True),
}
mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
overridden = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("outer",), backend_override={"outer": "gloo"})


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


def done(work: Any, *outputs: Any) -> list[Any]:
    return [work.wait(), outputs]


def with_root(options: Any, **named: Any) -> Any:
    for name, value in named.items():
        setattr(options, name, value)
    return options


def pair() -> list[torch.Tensor]:
    return [torch.zeros(2), torch.zeros(2)]


def message(*, anybody: bool) -> list[Any]:
    if RANK == 1:
        return done(WORLD.send([given(2)], 0, 5))
    received = torch.zeros(2)
    work = WORLD.recv_anysource([received], 5) if anybody else WORLD.recv([received], 1, 5)
    return [work.wait(), work._source_rank(), received]


def profiled() -> list[str]:
    """Under which names the profiler has a collective."""
    with torch.profiler.profile() as profiler, dist.record_comm("named by the user"):
        dist.all_reduce(given(2))
    found = (event.key for event in profiler.key_averages())
    return sorted(key for key in found if key.startswith(("c10d::", "gloo:", "named")))


def gathered_objects() -> list[Any]:
    gathered: list[Any] = [None, None]
    dist.gather_object({"rank": RANK}, gathered if RANK == 0 else None)
    return gathered


def at_root(verb: Callable[..., Any], tensor: torch.Tensor, tensors: list[torch.Tensor]) -> list[Any]:
    """A gather or a scatter: only the root has both."""
    verb(tensor, tensors if RANK == 0 else None, 0)
    return [tensor, tensors]


def over(dist_verb: Callable[..., Any], outputs: Any, *inputs: Any) -> Any:
    return [dist_verb(outputs, *inputs), outputs]


GROUPS_OWN: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: done(WORLD.allreduce(x := [given(2)], with_root(dist.AllreduceOptions(), timeout=LONG)), x),
    "allreduce by a word": lambda: done(WORLD.allreduce(x := [given(2)], dist.ReduceOp.PRODUCT, LONG), x),
    "allreduce_coalesced": lambda: done(
        WORLD.allreduce_coalesced(x := [given(2), given(3)], dist.AllreduceCoalescedOptions()), x
    ),
    "broadcast": lambda: done(WORLD.broadcast(x := [given(2)], with_root(dist.BroadcastOptions(), rootRank=1)), x),
    "reduce": lambda: done(WORLD.reduce(x := [given(2)], with_root(dist.ReduceOptions(), rootRank=RANK * 0)), x[RANK:]),
    "allgather": lambda: done(WORLD.allgather(x := [pair()], [given(2)]), x),
    "allgather_coalesced": lambda: done(WORLD.allgather_coalesced(x := [pair(), pair()], [given(2), given(2) + 5]), x),
    "allgather_into_tensor_coalesced": lambda: done(
        WORLD.allgather_into_tensor_coalesced(x := [torch.zeros(4)], [given(2)]), x
    ),
    "all_gather_single": lambda: done(WORLD.all_gather_single(x := torch.zeros(4), given(2)), x),
    "all_gather_single_coalesced": lambda: done(
        WORLD.all_gather_single_coalesced(x := [torch.zeros(4)], [given(2)]), x
    ),
    "gather": lambda: done(
        WORLD.gather(x := [pair()] if RANK == 0 else [], [given(2)], with_root(dist.GatherOptions(), rootRank=0)), x
    ),
    "scatter": lambda: done(
        WORLD.scatter(
            x := [torch.zeros(2)], [pair()] if RANK == 0 else [], with_root(dist.ScatterOptions(), rootRank=0)
        ),
        x,
    ),
    "reduce_scatter": lambda: done(
        WORLD.reduce_scatter(x := [torch.zeros(2)], [[given(2), given(2)]], dist.ReduceScatterOptions()), x
    ),
    "reduce_scatter_single": lambda: done(WORLD.reduce_scatter_single(x := torch.zeros(2), given(4)), x),
    "reduce_scatter_single_coalesced": lambda: done(
        WORLD.reduce_scatter_single_coalesced(x := [torch.zeros(2)], [given(4)]), x
    ),
    "reduce_scatter_tensor_coalesced": lambda: done(
        WORLD.reduce_scatter_tensor_coalesced(x := [torch.zeros(2)], [given(4)]), x
    ),
    "alltoall": lambda: done(WORLD.alltoall(x := pair(), [given(2), given(2)], dist.AllToAllOptions()), x),
    "alltoall_base": lambda: done(WORLD.alltoall_base(x := torch.zeros(4), given(4), [], []), x),
    "all_to_all_single": lambda: done(
        WORLD.all_to_all_single(x := torch.zeros(2 + 4 * RANK), given(4), [1 + 2 * RANK] * 2, [1, 3]), x
    ),
    "barrier": lambda: done(WORLD.barrier(dist.BarrierOptions())),
    "barrier by a word": lambda: done(WORLD.barrier(LONG)),
    "send": lambda: message(anybody=False),
    "send to anybody": lambda: message(anybody=True),
    "boxed": lambda: [type(WORLD.boxed()).__name__, dist.ProcessGroup.unbox(WORLD.boxed()).size()],
    "kinds of backends": lambda: [str(WORLD.BackendType(1)), str(WORLD.UNDEFINED), str(WORLD.GLOO), str(WORLD.CUSTOM)],
    "kinds of backends elsewhere": lambda: list(map(str, (WORLD.NCCL, WORLD.XCCL, WORLD.UCC, WORLD.MPI))),
    "keywords": lambda: done(WORLD.broadcast(opts=dist.BroadcastOptions(), tensors=(x := [given(2)])), x),
    "no tensor": lambda: WORLD.allreduce([]),
    "wrong root": lambda: WORLD.broadcast([given(2)], with_root(dist.BroadcastOptions(), rootRank=7)),
    "wrong shapes": lambda: WORLD._allgather_base(torch.zeros(3), given(2)),
    "wrong type": lambda: WORLD._allgather_base(torch.zeros(4, dtype=torch.int64), given(2)),
}
"""What only the group itself takes: lists of tensors, options."""

VERBS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: over(dist.all_reduce, given(2), dist.ReduceOp.MAX),
    "all_gather": lambda: over(dist.all_gather, pair(), given(2)),
    "all_gather_coalesced": lambda: over(dist.all_gather_coalesced, [pair(), pair()], [given(2), given(2) + 5]),
    "all_gather_single": lambda: over(dist.all_gather_single, torch.zeros(4), given(2)),
    "all_to_all": lambda: over(dist.all_to_all, pair(), [given(2), given(2) + 5]),
    "broadcast": lambda: over(dist.broadcast, given(2), 1),
    "gather": lambda: at_root(dist.gather, given(2), pair()),
    "scatter": lambda: at_root(dist.scatter, torch.zeros(2), [given(2), given(2) + 5]),
    "reduce": lambda: over(dist.reduce, given(2), 0) if RANK == 0 else dist.reduce(given(2), 0),
    "reduce_scatter": lambda: over(dist.reduce_scatter, torch.zeros(2), [given(2), given(2) + 5]),
    "reduce_scatter_single": lambda: over(dist.reduce_scatter_single, torch.zeros(2), given(4)),
    "gather_object": gathered_objects,
    "itself": lambda: dist.send(given(2), RANK),
    "wrong parts": lambda: dist.all_to_all_single(torch.zeros(4), given(4), [1, 1], [2, 2]),
    "no list": lambda: dist.all_gather(given(2), given(2)),
    "no tensor": lambda: dist.all_reduce([1.0]),
    "root without a list": lambda: dist.scatter(torch.zeros(2), None, RANK),
    "record_comm": profiled,
    "shrink_group": lambda: dist.shrink_group([1]).size(),
}
HERE: dict[str, Callable[[], Any]] = {
    "how many": lambda: [dist.get_pg_count(), dist.get_world_size(), dist.get_node_local_rank()],
    "what is up": lambda: [dist.is_available(), dist.is_initialized(), dist.is_torchelastic_launched()],
    "members": lambda: [str(dist.GroupMember.NON_GROUP_MEMBER), dist.GroupMember.WORLD is WORLD],
    "backends there are": lambda: [
        [dist.is_gloo_available(), dist.is_mpi_available(), dist.is_nccl_available()],
        [dist.is_ucc_available(), dist.is_xccl_available(), dist.is_backend_available("gloo")],
        [dist.get_default_backend_for_device("cpu"), str(dist.BackendConfig(dist.Backend("gloo")))],
        [dist.supports_complex(dist.ReduceOp.SUM), dist.supports_complex(dist.ReduceOp.MAX)],
    ],
    "time-out": lambda: str(dist.default_pg_timeout),
    "initialized twice": dist.init_process_group,
}


LATER: dict[str, Callable[[], Any]] = (
    {
        "gather_single, of torch.distributed": lambda: [
            dist.gather_single(given(2), x := torch.zeros(4) if RANK == 0 else None, dst=0),
            x,
        ],
        "gather_into_tensor, of torch.distributed": lambda: [
            dist.gather_into_tensor(given(2), x := torch.zeros(4) if RANK == 0 else None, dst=0),
            x,
        ],
        "gather_single, of the group": lambda: done(
            WORLD.gather_single(x := torch.zeros(4), given(2), with_root(dist.GatherOptions(), rootRank=0)),
            x[RANK * 4 :],
        ),
        "gather_into_tensor, of the group": lambda: done(
            WORLD.gather_into_tensor(x := torch.zeros(4), given(2), with_root(dist.GatherOptions(), rootRank=0)),
            x[RANK * 4 :],
        ),
        "backend itself, by its new name": lambda: type(WORLD.get_backend(CPU)).__name__,
        "backend itself, of torch.distributed": lambda: type(dist.get_backend_impl(WORLD, CPU)).__name__,
        "time-out, set": lambda: dist.set_timeout(dt.timedelta(seconds=35), made["gloo"]),
        "supports what is newer": lambda: [WORLD.supports_window, WORLD.supports_reconfigure],
        "window": lambda: type(WORLD.new_window(given(2))).__name__,
        "pre hook": lambda: [WORLD.register_pre_hook(7, print), WORLD.unregister_pre_hook(7)],
        "post hook": lambda: [WORLD.register_post_hook(8, print), WORLD.unregister_post_hook(8)],
        "abort hook": lambda: [WORLD.register_abort_hook(9, print), WORLD.unregister_abort_hook(9)],
        "reconfigure handle": WORLD.get_reconfigure_handle,
        "reconfigure": lambda: WORLD.reconfigure(c10d.ReconfigureOptions()),
    }
    if hasattr(dist, "gather_single")
    else {}
)
"""What came with torch 2.14."""
if hasattr(dist.ProcessGroup, "supports_abort_hooks"):  # torch 2.15, or later
    LATER["supports hooks"] = lambda: [WORLD.supports_abort_hooks, WORLD.supports_completion_hooks]
ESTIMATES = next(name for name in ("supports_time_estimate", "_supports_time_estimate") if hasattr(backend, name))
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
    "supports": lambda: [backend.supports_splitting, backend.supports_coalescing, getattr(backend, ESTIMATES)],
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
    **{f"{name}, of torch.distributed": ask for name, ask in VERBS.items()},
    **{f"{name}, of the group": ask for name, ask in GROUPS_OWN.items()},
    **HERE,
    **LATER,
    "destroyed": lambda: dist.destroy_process_group(made["map"]),
    "split_group": lambda: dist.split_group(split_ranks=[[0], [1]]).size(),
    "split": lambda: WORLD.split_group([0]).size(),
    "options": lambda: dist.new_group([0, 1], backend="gloo", pg_options=dist.ProcessGroupGloo._Options()).size(),
    "coalescing by a device": lambda: coalesced(CPU),
    "merge_remote_group": lambda: made["none"].merge_remote_group(dist.HashStore(), 2, SHORT).size(),
    "shutdown": made["local"].shutdown,
    "abort": made["alone"].abort,
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
