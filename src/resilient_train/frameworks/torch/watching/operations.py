"""Operations of torch as a ``TorchDispatchMode`` sees them: what each reads and writes, and in which memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode, is_traceable_wrapper_subclass

_OVERWRITE = frozenset(
    {
        *("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_"),
        *("_foreach_copy_", "_foreach_zero_"),
    }
)
"""They don't ask for what was there."""
_SPARSE = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_NO_PASS = -1


class Form(NamedTuple):
    """What is known of an operation by its declaration: of its arguments, which it writes, and does not read."""

    name: str = ""
    namespace: str = ""
    arguments: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    sizes_by_value: bool = False


def in_backward() -> bool:
    """Whether a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != _NO_PASS)


@functools.cache
def form_of(func: Any) -> Form:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Form()  # of higher order: made of others
    namespace, _, name = schema.name.partition("::")
    written = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    unread = [each.name for each in written if each.is_out or name in _OVERWRITE]
    return Form(
        name,
        namespace,
        tuple(each.name for each in schema.arguments),
        frozenset(each.name for each in written),
        frozenset(unread),
        torch.Tag.dynamic_output_shape in func.tags,
    )


def sorted_arguments(form: Form, args: Sequence[Any], named: dict[str, Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors that an operation reads, and the arguments that it writes."""
    if not form.written:
        return in_memory([args, *named.values()]), []
    read, written = list[torch.Tensor](), list[Any]()
    names = itertools.chain(form.arguments, itertools.repeat(""))
    for name, value in (*zip(names, args, strict=False), *named.items()):
        tensors = in_memory(value)
        read += [] if name in form.unread else tensors
        written += [value] if tensors and name in form.written else []
    return read, written


def in_memory(value: Any) -> list[torch.Tensor]:
    """The tensors with memory of their own in an argument or result."""
    return [tensor for tensor, _ in memories(value)]


def memories(value: Any) -> list[tuple[torch.Tensor, bool]]:
    """The same, and whether each is of a sparse one."""
    found: list[tuple[torch.Tensor, bool]] = []
    _find(value, found)
    return found


def _find(value: Any, found: list[tuple[torch.Tensor, bool]]) -> None:
    if isinstance(value, torch.Tensor):
        inner: Any = value
        if type(inner) is not torch.Tensor and is_traceable_wrapper_subclass(inner):  # a DTensor, or the like
            for name in inner.__tensor_flatten__()[0]:
                _find(getattr(inner, name), found)
        elif value.layout is torch.strided:
            found.append((value, False))
        elif value.layout is torch.sparse_coo:
            found.append((value._values(), True))
        elif value.layout in _SPARSE:
            found.append((value.values(), True))
    elif isinstance(value, (list, tuple)):
        for each in value:
            _find(each, found)


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def has_memory(ref: StorageWeakRef) -> bool:
    """Some leave a tensor, and take its memory away; and a tensor on the device "meta" has none."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return storage is not None and storage.nbytes() > 0 and storage.device.type != "meta"


def put_below(mode: TorchDispatchMode) -> None:
    """Under those that the script has entered: it leaves them by taking away the uppermost one."""
    take_out(mode)
    above = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    for each in (mode, *reversed(above)):
        _push_mode(each)


def take_out(mode: TorchDispatchMode) -> None:
    were = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    for each in reversed(were):
        if each is not mode:
            _push_mode(each)
