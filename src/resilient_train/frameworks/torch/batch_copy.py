"""A batch as it was drawn, so that a step that is redone finds it so, in the very same objects.

A body may put other things into it (``batch["x"] = batch["x"].to(device)``), which costs nothing to take back; or write
into its tensors and arrays, for which there must be a copy. The objects stay the same ones, because others may know
them: a loader that uses its memory again, or state of the user's that lies there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from resilient_train.frameworks.torch.arguments import look
from resilient_train.frameworks.torch.leaves import PLAIN
from resilient_train.frameworks.torch.watched_state import Mark, mark_of

_MOST = 10_000
"""Of objects that are looked at: what hangs together with more of them is no batch."""
_MANY = 64
_NO_DATA = (type, types.ModuleType, types.FunctionType, torch.nn.Module, Dataset, DataLoader, Iterator)

Array = np.ndarray[Any, Any]


class RememberedBatch:
    """See ``frameworks/roles.Remembered``."""

    def __init__(self, batch: Any, *, copies: bool, looks: bool) -> None:
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[Array] = []
        self._walk(batch, set(), deep=True)
        self._marks = self._present_marks()
        self._looks = looks
        self._seen = self._look()
        self._copies: list[torch.Tensor | Array] | None = None
        if copies:
            with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
                tensors = [each.detach().clone() for each in self._tensors]
                self._copies = [*tensors, *(each.copy() for each in self._arrays)]

    def _walk(self, value: Any, seen: set[int], *, deep: bool) -> None:
        """``deep``: also into an object of the user's. What that knows in its turn need not be data (its loader)."""
        if type(value) in PLAIN or id(value) in seen or len(seen) > _MOST:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_inference():
                self._tensors.append(value)
        elif isinstance(value, np.ndarray):
            if value.dtype.hasobject is False and value.flags.writeable:
                self._arrays.append(value)
        elif isinstance(value, dict):
            self._dicts.append((value, dict(value)))
            self._walk_all(list(value.values()), seen, deep=deep)
        elif isinstance(value, list):
            self._lists.append((value, list(value)))
            self._walk_all(value, seen, deep=deep)
        elif isinstance(value, tuple):
            self._walk_all(value, seen, deep=deep)
        elif isinstance(inner := getattr(value, "__dict__", None), dict) and not isinstance(value, _NO_DATA):
            data = dataclasses.is_dataclass(value) or isinstance(value, (UserDict, types.SimpleNamespace))
            if data or deep:
                self._dicts.append((inner, dict(inner)))
                self._walk_all(list(inner.values()), seen, deep=deep and data)

    def _walk_all(self, values: Sequence[Any], seen: set[int], *, deep: bool) -> None:
        if len(values) > _MANY and type(values[0]) in PLAIN and type(values[-1]) in PLAIN:
            return  # text, or numbers
        for item in values:
            self._walk(item, seen, deep=deep)

    def _present_marks(self) -> list[Mark]:
        return [mark_of(each) for each in self._tensors]

    def _look(self) -> bytes:
        """Arrays say nothing of themselves, so a few words of them are read each time."""
        if not self._looks and not self._arrays:
            return b""
        return look([*(self._tensors if self._looks else ()), *self._arrays])

    def written(self) -> bool:
        return self._present_marks() != self._marks or self._look() != self._seen

    def put_back(self) -> bool:
        for one, items in self._lists:
            if len(one) != len(items) or any(a is not b for a, b in zip(one, items, strict=True)):
                one[:] = items
        for each, entries in self._dicts:
            if each.keys() != entries.keys() or any(each[key] is not value for key, value in entries.items()):
                each.clear()
                each.update(entries)
        if self._copies is None:
            return not self.written()
        things: list[torch.Tensor | Array] = [*self._tensors, *self._arrays]
        for thing, copy in zip(things, self._copies, strict=True):
            _write(thing, copy)
        self._marks = self._present_marks()
        return True


def _write(thing: torch.Tensor | Array, copy: torch.Tensor | Array) -> None:
    if not isinstance(thing, torch.Tensor):
        np.copyto(thing, copy)
        return
    assert isinstance(copy, torch.Tensor)
    if thing.shape != copy.shape:  # `x.data = ...`
        thing.data = copy.clone()
    elif thing.numel() <= 1 or 0 not in thing.stride():  # nobody can have written to an expanded one
        with torch.no_grad():
            thing.copy_(copy)
