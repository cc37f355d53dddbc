"""What of ``rank_state`` and ``state`` a loader may draw the order of a pass from.

A sampler may weigh samples by what the training has found of them. The order of a pass is then that of the weights with
which it began, and another process that looks for its place in it must draw it from those, whatever they are by now.
"""

from __future__ import annotations

import dis
import gc
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.tensors.containers import dressed
from resilient_train.frameworks.torch.tensors.leaves import pack, restore_object, state_of, unpack
from resilient_train.frameworks.torch.watching.reached import leads_to, walk
from resilient_train.script_place import is_users

_CONTAINERS = (list, dict, set, torch.Generator)  # of numbers alone, Python's collector does not know them
_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_NEAR = 20_000
"""So many of the objects that a loader or a registered object leads to are looked at, the nearest first."""


class TorchPassOrder:
    """See ``frameworks/roles.PassOrder``."""

    def __init__(self, objects: Objects) -> None:
        self._own = dict(objects.rank_extra)
        self._shared = {f"state[{name!r}]": thing for name, thing in objects.extra.items()}
        self._led_to: frozenset[str] | None = None

    def led_to(self, loader: Any) -> Collection[str]:
        if self._led_to is None:
            self._led_to = frozenset(self._in(_around(loader)))
        return self._led_to

    def in_samples(self, loader: Any) -> bool:
        return not _forks(loader) and any(self._in(walk(_makers(loader), read_too)))

    def _in(self, found: Iterator[Any]) -> Iterator[str]:
        things = {**self._own, **self._shared}
        near = set(_marks(found)) if things else set[object]()
        # What an object gives as its state it may hold elsewhere, as in a global variable.
        leads = {name: {id(each), *_marks(walk([each, state_of(each)]))} for name, each in things.items()}
        return (name for name, marks in leads.items() if marks & near)

    def entries(self, loader: Any) -> dict[str, bytes]:
        led_to = self.led_to(loader)
        shared = {name: each for name, each in self._shared.items() if name in led_to}
        return {**self.own(), **{name: pack(state_of(each)) for name, each in shared.items()}}

    def own(self) -> dict[str, bytes]:
        return {name: pack(state_of(each)) for name, each in self._own.items()}

    def restore(self, entries: Mapping[str, bytes]) -> None:
        for name, state in entries.items():
            thing = self._own[name] if name in self._own else self._shared[name]
            restore_object(thing, dressed(unpack(state, placed=True), state_of(thing)))


def _forks(loader: Any) -> bool:
    """Whether it has workers, which hold what they were forked with."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def _makers(loader: Any) -> list[Any]:
    """What makes its batches when their order is known."""
    return [getattr(loader, name, None) for name in ("dataset", "collate_fn")]


def _around(loader: Any) -> Iterator[Any]:
    """What its order is drawn from, and what its workers hold: they are forked as the pass begins.

    Where there are no workers each sample is made of what is there when it is asked for by its number. Then a data set
    gives no order, but says how many they are.
    """
    makers, forks = _makers(loader), False

    def step(each: Any) -> Iterable[Any] | None:
        nonlocal forks
        kind = type(each)
        forks = forks or _forks(each)
        if forks or issubclass(kind, IterableDataset):
            return read_too(each)
        if issubclass(kind, Dataset) or any(each is it for it in makers):
            return _counted_by(each) or None
        return read_too(each)

    return walk([loader], step)


def _counted_by(data_set: Any) -> list[Any]:
    """What ``len()`` of it reads, but for tensors: none of them grows in its place."""
    methods = {each.__name__: each for each in reversed(_methods(type(data_set)))}
    own, found = getattr(data_set, "__dict__", {}), list[Any]()
    waiting, seen = ["__len__"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in own:
            value = own[name]
            if not all(map(_is_values, value if isinstance(value, (list, tuple)) else [value])):
                found.append(value)
        elif name in methods and name not in seen:
            found += _read_by(methods[name]) or ()
            waiting += methods[name].__code__.co_names
        seen.add(name)
    return found


def read_too(each: Any) -> Iterable[Any] | None:
    """What it holds on to, and what its functions read."""
    kind = type(each)
    if issubclass(kind, FunctionType):
        return _read_by(each)
    further = () if issubclass(kind, torch.nn.Module) else leads_to(each)
    return further and [*further, *_methods(kind)]


def _is_values(each: Any) -> bool:
    return isinstance(each, (torch.Tensor, np.ndarray))


def _methods(kind: type) -> list[FunctionType]:
    return [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, FunctionType)]


def _read_by(function: FunctionType) -> Iterable[Any] | None:
    """Variables around it and of its file, which one of the user's may read: a sampler may take weights from there."""
    if not is_users(function.__code__.co_filename):
        return None
    codes, names = [function.__code__], dict[str, None]()  # in an order that another process finds, too
    while codes:
        code = codes.pop()
        # Not all of `co_names`: an attribute may be called as a variable of the file.
        names |= dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname in _READS)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    of_file = function.__globals__
    return [*(function.__closure__ or ()), *(of_file[name] for name in names if name in of_file)]


def _marks(found: Iterator[Any]) -> Iterator[object]:
    """Two that hold the same object, or the same memory, have one in common. Numbers, texts and functions are shared by
    objects that have nothing to do with each other.
    """
    for each in islice(found, _NEAR):
        kind = type(each)
        if issubclass(kind, (torch.Tensor, np.ndarray)):
            yield "memory", _memory(each)
        elif issubclass(kind, _CONTAINERS) or (gc.is_tracked(each) and not issubclass(kind, (tuple, FunctionType))):
            yield id(each)


def _memory(values: Any) -> int:
    """Where it begins, also of a part of it."""
    if isinstance(values, torch.Tensor):
        try:
            return values.untyped_storage().data_ptr() or id(values)
        except (RuntimeError, NotImplementedError):  # it has none
            return id(values)
    while isinstance(values.base, np.ndarray):
        values = values.base
    address: int = values.__array_interface__["data"][0]
    return address
