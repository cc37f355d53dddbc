"""The memory that tensors lie in, named so that neither its end nor its use for something else is missed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from resilient_train.errors import UsageError
from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.tensors.extra_state import ExtraState
from resilient_train.frameworks.torch.tensors.leaves import gradients_of, local, state_of

Memory = frozenset[StorageWeakRef]
"""Storages by name: it holds on to the names only, and a name is given once as long as somebody holds on to it."""


def memory_of(tensors: Iterable[torch.Tensor]) -> Memory | None:
    """None: one of them has no storage (a sparse one)."""
    kept = [local(tensor) for tensor in tensors]
    if any(tensor.layout is not torch.strided for tensor in kept):
        return None
    return frozenset(StorageWeakRef(tensor.untyped_storage()) for tensor in kept)  # type: ignore[no-untyped-call]


def holds(all_of_it: Memory, part: Memory | None) -> bool:
    """Whether all of ``part`` is there."""
    return part is not None and part <= all_of_it


def registered(objects: Objects) -> Memory:
    """The memory of all tensors whose content a new process is given."""
    return _plain_memory(_tensors_in(_state_in(objects)))


def gradients(objects: Objects) -> Memory:
    """The memory of those that registered parameters have."""
    return _plain_memory(each for _, each in gradients_of(objects.models))


def _plain_memory(tensors: Iterable[torch.Tensor]) -> Memory:
    with_one = (each for each in tensors if not torch.nn.parameter.is_lazy(each) and each.layout is torch.strided)
    return memory_of(with_one) or frozenset()


def _state_in(objects: Objects) -> Iterator[Any]:
    for model in objects.models:
        yield [*model.parameters(), *model.buffers()]
    yield ExtraState(objects.models).held()
    for optimizer in objects.optimizers:
        yield list(optimizer.state.values())
        yield optimizer.param_groups
    for thing in (*objects.extra.values(), *objects.rank_extra.values()):
        with contextlib.suppress(UsageError):  # a Carried into which nothing was put yet
            yield state_of(thing)


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _tensors_in(tree.values())
    elif isinstance(tree, Iterable) and not isinstance(tree, (str, bytes, np.ndarray)):
        for item in tree:
            yield from _tensors_in(item)
