"""A batch as it was drawn, so that a step that is redone finds it so, in the very same objects.

A body may put other things into it (``batch["x"] = batch["x"].to(device)``), which costs nothing to take back; or write
into its tensors and arrays, for which there must be a copy. The objects stay the same ones, because others may know
them: a loader that uses its memory again, or state of the user's that lies there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections import UserDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from resilient_train.errors import UsageError
from resilient_train.frameworks.torch.kept.watched_state import array_digest, mark_of
from resilient_train.frameworks.torch.tensors.fingerprint import tensor_digest
from resilient_train.frameworks.torch.tensors.leaves import PLAIN

NO_DATA = (type, types.ModuleType, types.FunctionType, torch.nn.Module, Dataset, DataLoader)

_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_MADE_OF = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COLUMNS),
}
"""Of a sparse tensor, how it is asked for its parts."""

Array = np.ndarray[Any, Any]


class _Tensor(NamedTuple):
    """As it was: ``alias`` has its memory, whatever it is given later."""

    tensor: torch.Tensor
    alias: torch.Tensor
    wants_gradient: bool
    gradient: torch.Tensor | None
    leaf: bool


class RememberedBatch:
    """See ``frameworks/roles.Remembered``. Raises UsageError for a batch that can be used once only."""

    def __init__(self, batch: Any, *, copies: bool, looks: bool) -> None:
        self._lists: list[tuple[Any, list[Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._slots: list[tuple[Any, dict[str, Any]]] = []
        self._tensors: list[_Tensor] = []
        self._sparse: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[Array] = []
        self._objects: list[tuple[Array, list[Any]]] = []
        self._walk(batch)
        self._looks = looks
        self._marks = self._present_marks()
        self._copies: list[torch.Tensor | Array] | None = None
        if copies:
            with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
                tensors = [each.alias.clone() for each in self._tensors]
                self._copies = [*tensors, *(each.copy() for each in self._arrays)]

    def _walk(self, batch: Any) -> None:
        """An object of the user's is looked into once: what it knows in its turn need not be data (its loader)."""
        seen: set[int] = set()
        waiting = [(batch, True)]
        while waiting:
            value, deep = waiting.pop()
            if type(value) in PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                if _can_be_put_back(value):
                    own = value.requires_grad, value.grad if value.is_leaf else None, value.is_leaf
                    self._tensors.append(_Tensor(value, value.detach(), *own))
                else:
                    waiting += [(part, deep) for part in self._into_tensor(value)]
            elif isinstance(value, np.ndarray):
                if value.dtype == object:
                    self._objects.append((value, list(value.flat)))
                    waiting += [(item, deep) for item in value.flat]
                elif value.dtype.hasobject is False and value.flags.writeable:
                    self._arrays.append(value)
            else:
                items, deep = self._into(value, deep=deep)
                waiting += [(item, deep) for item in items]

    def _into_tensor(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors that another one is made of. A sparse one may be given others in place."""
        if torch.nn.parameter.is_lazy(value) or value.is_inference():
            return ()
        if value.is_nested:
            ragged: Any = value
            return (ragged._values, ragged._offsets) if hasattr(value, "_offsets") else (value.values(),)
        if value.layout not in _MADE_OF:
            return ()
        alias = value.detach()
        self._sparse.append((value, alias))
        return [getattr(alias, name)() for name in _MADE_OF[value.layout]]

    def _into(self, value: Any, *, deep: bool) -> tuple[Iterable[Any], bool]:
        """What is in there, and whether objects of the user's among it are looked into."""
        if isinstance(value, dict):
            self._dicts.append((value, dict(value)))
            return value.values() if not PLAIN.issuperset(map(type, value.values())) else (), deep
        if isinstance(value, (list, deque)):
            self._lists.append((value, list(value)))
            return value if not PLAIN.issuperset(map(type, value)) else (), deep
        if isinstance(value, (tuple, set, frozenset)):
            return value if not PLAIN.issuperset(map(type, value)) else (), deep
        if isinstance(value, Iterator):
            raise UsageError(
                f"step.batch is or has a {type(value).__qualname__}, which can be gone through once: a step that is "
                "redone would find it used up; let the loader give a list"
            )
        inner, slots = getattr(value, "__dict__", None), slots_of(value)
        data = is_data(value)
        if isinstance(value, NO_DATA) or not (data or deep) or not (isinstance(inner, dict) or slots):
            return (list(value.values()), deep) if isinstance(value, Mapping) else ((), False)
        if slots:
            self._slots.append((value, slots))
        if isinstance(inner, dict):
            self._dicts.append((inner, dict(inner)))
        return [*slots.values(), *(inner.values() if isinstance(inner, dict) else ())], deep and data

    def _present_marks(self) -> list[Any]:
        """Arrays say nothing of themselves, so they are read each time."""
        marks: list[Any] = [mark_of(each.alias) for each in self._tensors]
        if self._looks:
            marks += [tensor_digest(each.alias) for each in self._tensors if each.alias.is_cpu]
        return [*marks, *map(array_digest, self._arrays)]

    def written(self) -> bool:
        return self._present_marks() != self._marks

    def put_back(self) -> bool:
        self._put_items_back()
        for tensor, alias in self._sparse:
            names = _MADE_OF[alias.layout]
            if any(getattr(tensor, name)().data_ptr() != getattr(alias, name)().data_ptr() for name in names):
                tensor.data = alias
        if not all(map(_put_tensor_back, self._tensors)):
            return False
        if self._copies is None:
            return not self.written()
        with torch.no_grad():
            things: list[torch.Tensor | Array] = [*(each.alias for each in self._tensors), *self._arrays]
            for thing, copy in zip(things, self._copies, strict=True):
                _write(thing, copy)
        self._marks = self._present_marks()
        return True

    def _put_items_back(self) -> None:
        for one, items in self._lists:
            if len(one) != len(items) or any(a is not b for a, b in zip(one, items, strict=True)):
                one.clear()
                one.extend(items)
        for each, entries in self._dicts:
            if each.keys() != entries.keys() or any(each[key] is not value for key, value in entries.items()):
                each.clear()
                each.update(entries)
        for array, items in self._objects:
            for place, item in enumerate(items):
                if array.flat[place] is not item:
                    array.flat[place] = item
        for value, slots in self._slots:
            for name, item in slots.items():
                if getattr(value, name, None) is not item:
                    object.__setattr__(value, name, item)


def _can_be_put_back(tensor: torch.Tensor) -> bool:
    lazy = torch.nn.parameter.is_lazy(tensor)
    return not lazy and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_inference()


def is_data(value: Any) -> bool:
    """Whether it is there to hold other things, and knows nothing else."""
    return dataclasses.is_dataclass(value) or isinstance(value, (UserDict, types.SimpleNamespace))


def slots_of(value: Any) -> dict[str, Any]:
    """What an object has in places of its class's."""
    names = [name for kind in type(value).__mro__ for name in _names_in(vars(kind).get("__slots__", ()))]
    found = dict[str, Any]()
    for name in names:
        if name[:2] != "__":
            with contextlib.suppress(AttributeError):  # nothing is in it
                found[name] = object.__getattribute__(value, name)
    return found


def _names_in(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _put_tensor_back(was: _Tensor) -> bool:
    """All but its data. False: it is a part of another graph now, and of others' memory."""
    tensor, alias = was.tensor, was.alias
    if was.leaf and tensor.grad_fn is not None:
        if tensor._is_view():
            return False
        tensor.detach_()
    if (tensor.data_ptr(), tensor.dtype, tensor.shape) != (alias.data_ptr(), alias.dtype, alias.shape):
        tensor.data = alias
    if was.leaf:
        if tensor.requires_grad != was.wants_gradient:
            tensor.requires_grad_(was.wants_gradient)
        if tensor.grad is not was.gradient:
            tensor.grad = was.gradient
    return True


def _write(thing: torch.Tensor | Array, copy: torch.Tensor | Array) -> None:
    if not isinstance(thing, torch.Tensor):
        np.copyto(thing, copy)
    elif isinstance(copy, torch.Tensor) and not _same(thing, copy):  # a write that changes nothing is counted too
        thing.copy_(copy)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By bits, which ``torch.equal`` does not see in a zero. Nobody can have written to an expanded tensor."""
    if one.is_cpu:
        return tensor_digest(one) == tensor_digest(other)
    return one.numel() > 1 and 0 in one.stride()
