"""Collectives of a rank that is alone for now: what each gives if every other rank contributes what this one does not.

A reduction over one rank is its input, a broadcast keeps what is there, a gather finds this rank's data in every place.
The values do not matter (state comes from a replica later); that nothing blocks does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined] # not in torch's stub

Tensors = Sequence[torch.Tensor]


def done(result: Any) -> dist.Work:
    """A work that is complete already."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    work: dist.Work = _create_work_from_future(future)
    return work


def _keep(_rank: int, _size: int, tensors: Any, *_: Any) -> dist.Work:
    return done(list(tensors) if isinstance(tensors, (list, tuple)) else [tensors])


def _nothing(_rank: int, _size: int, *_: Any) -> dist.Work:
    return done([])


def _allgather(_rank: int, _size: int, outputs: Sequence[Tensors], inputs: Tensors, *_: Any) -> dist.Work:
    for places, value in zip(outputs, inputs, strict=True):
        for place in places:
            place.copy_(value)
    return done(outputs)


def _allgather_into(_rank: int, size: int, output: torch.Tensor, value: torch.Tensor, *_: Any) -> dist.Work:
    for part in output.view(-1).chunk(size):
        part.copy_(value.reshape(-1))
    return done([output])


def _allgather_into_many(_rank: int, size: int, outputs: Tensors, inputs: Tensors, *_: Any) -> dist.Work:
    for output, value in zip(outputs, inputs, strict=True):
        _allgather_into(_rank, size, output, value)
    return done(list(outputs))


def _gather(rank: int, _size: int, outputs: Sequence[Tensors], inputs: Tensors, *_: Any) -> dist.Work:
    return _allgather(rank, _size, outputs, inputs) if outputs else done([])


def _scatter(rank: int, _size: int, outputs: Tensors, inputs: Sequence[Tensors], *_: Any) -> dist.Work:
    for output, parts in zip(outputs, inputs, strict=False):
        output.copy_(parts[rank])
    return done(list(outputs))


def _reduce_scatter_into(rank: int, size: int, output: torch.Tensor, value: torch.Tensor, *_: Any) -> dist.Work:
    output.view(-1).copy_(value.reshape(-1).chunk(size)[rank])
    return done([output])


def _reduce_scatter_into_many(rank: int, size: int, outputs: Tensors, inputs: Tensors, *_: Any) -> dist.Work:
    for output, value in zip(outputs, inputs, strict=True):
        _reduce_scatter_into(rank, size, output, value)
    return done(list(outputs))


def _alltoall(_rank: int, _size: int, outputs: Tensors, inputs: Tensors, *_: Any) -> dist.Work:
    for output, value in zip(outputs, inputs, strict=True):
        if output.shape == value.shape:
            output.copy_(value)
    return done(list(outputs))


def _alltoall_into(_rank: int, _size: int, output: torch.Tensor, value: torch.Tensor, *_: Any) -> dist.Work:
    if output.shape == value.shape:
        output.copy_(value)
    return done([output])


VERBS: dict[str, Callable[..., dist.Work]] = {
    "allreduce": _keep,
    "allreduce_coalesced": _keep,
    "broadcast": _keep,
    "reduce": _keep,
    "allgather": _allgather,
    "allgather_coalesced": _allgather,
    "_allgather_base": _allgather_into,
    "all_gather_single": _allgather_into,
    "allgather_into_tensor_coalesced": _allgather_into_many,
    "all_gather_single_coalesced": _allgather_into_many,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _scatter,
    "_reduce_scatter_base": _reduce_scatter_into,
    "reduce_scatter_single": _reduce_scatter_into,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_into_many,
    "reduce_scatter_single_coalesced": _reduce_scatter_into_many,
    "alltoall": _alltoall,
    "alltoall_base": _alltoall_into,
    "all_to_all_single": _alltoall_into,
    "barrier": _nothing,
    "send": _keep,
    "recv": _keep,
    "recv_anysource": _keep,
}
"""Verb of ``ProcessGroup`` -> what it does alone; called as ``f(rank, size, *arguments of the verb)``."""
