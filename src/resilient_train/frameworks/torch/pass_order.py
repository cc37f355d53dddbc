"""What of ``rank_state`` and ``state`` a loader may draw the order of a pass from.

A sampler may weigh samples by what the training has found of them. The order of a pass is then that of the weights with
which it began, and another process that looks for its place in it must draw it from those, whatever they are by now.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.containers import dressed
from resilient_train.frameworks.torch.leaves import pack, restore_object, state_of, unpack
from resilient_train.frameworks.torch.reached import walk

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
            things = {**self._own, **self._shared}
            near = {id(each) for each in _changing(_around(loader))} if things else set[int]()
            # What an object gives as its state it may hold elsewhere, as in a global variable.
            leads = {name: _changing(walk([each, state_of(each)])) for name, each in things.items()}
            self._led_to = frozenset(name for name, parts in leads.items() if any(id(part) in near for part in parts))
        return self._led_to

    def entries(self, loader: Any) -> dict[str, bytes]:
        led_to = self.led_to(loader)
        shared = {name: each for name, each in self._shared.items() if name in led_to}
        return {name: pack(state_of(each)) for name, each in (self._own | shared).items()}

    def restore(self, entries: Mapping[str, bytes]) -> None:
        for name, state in entries.items():
            thing = self._own[name] if name in self._own else self._shared[name]
            restore_object(thing, dressed(unpack(state), state_of(thing)))


def _around(loader: Any) -> Iterator[Any]:
    """What it leads to, but for samples: a data set that is asked for each by its number gives no order."""
    samples = getattr(loader, "dataset", None)

    def gives_no_order(each: Any) -> bool:
        return not issubclass(type(each), IterableDataset) and (each is samples or issubclass(type(each), Dataset))

    return walk([loader], gives_no_order)


def _changing(found: Iterator[Any]) -> Iterator[Any]:
    """What can hold a value that changes. Numbers, texts and functions are shared by objects that have nothing to do
    with each other.
    """
    for each in islice(found, _NEAR):
        kind = type(each)
        if issubclass(kind, (torch.Tensor, torch.Generator, np.ndarray)) or (
            gc.is_tracked(each) and not issubclass(kind, tuple)
        ):
            yield each
