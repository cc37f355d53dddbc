"""One object of the user's in ``state=``: copied for each window while it is small, or is written before updates.

A large one is watched: the version counters and addresses of its tensors, and all else by value, so that one that puts
new tensors in the place of the old ones, or counts, is seen as well. For an ``nn.Module`` this does not ask for its
``state_dict()``, which takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from resilient_train.frameworks.roles import StateMark
from resilient_train.frameworks.torch.tensors.containers import copy_tree
from resilient_train.frameworks.torch.tensors.fingerprint import tensor_digest
from resilient_train.frameworks.torch.tensors.leaves import BITS, PLAIN, restore_object, state_of
from resilient_train.state.tree import flatten

_SMALL_BYTES, _SMALL_LEAVES = 64 << 10, 256
LOOKED_AT = 2
"""So many windows are compared by digest: what a loop writes before its updates it writes each time, as a rule. A large
object is copied all the same in its first ones.
"""

Mark = tuple[int, int]
"""A tensor's version, and where it lies."""


class WatchedState:
    """``thing`` has ``state_dict`` and ``load_state_dict``, or the likes of a generator's."""

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing = name, thing
        self.told = f"state[{name!r}]"
        self.early = False
        """It is large, and written before updates."""
        self.kept: Any = None
        """What it was when the window began, if there is a copy."""
        self._behind: Any = None
        """What it was when the body was cut, if there was none."""
        self._look_anew = LOOKED_AT
        self._found = self._unwatchable = False
        self._seen: tuple[Any, list[Any]] | None = None
        """What holds its tensors, so that no other one comes to lie where they do; and the marks of all that it is."""
        self._digest = ""
        self._modules, self._dicts = _parts_of(thing)

    def begin(self, *, whole: bool) -> None:
        """A window begins. ``whole``: it is to be kept in any case."""
        self.kept = self._behind = self._seen = None
        self._digest = ""
        if whole or self.early or self._unwatchable:
            self.kept = self.copy()
            return
        if self._look_anew == 0 and self._dicts is not None:  # a module does not become small
            self._seen = self._signature()
            return
        state = state_of(self.thing)
        if is_small(state):
            self.kept, self._look_anew = copy_tree(state), LOOKED_AT
            return
        self._seen = self._signature(state)
        if self._look_anew:
            self._look_anew -= 1
            self._unwatchable = _is_unwatchable(state, state_of(self.thing))
            self.kept, self._digest = copy_tree(state), digest_of_state(state)

    def look(self) -> bool:
        """Whether it was written since, and can't be put back."""
        if self._seen is None or self.early:
            return False
        written = self._signature()[1] != self._seen[1]
        if not written and not self._digest:
            return False
        if written or digest_of_state(state_of(self.thing)) != self._digest:
            self.early = self._found = True
            return self.kept is None
        return False

    def mark(self) -> StateMark:
        """By what it is; a large one of which there is no copy, by which version of it: one that bodies write may be
        written to ``tensor.data``.
        """
        state = None if self._dicts is not None and self.kept is None else state_of(self.thing)
        if state is not None and (self._unwatchable or self.kept is not None or is_small(state)):
            return StateMark(digest_of_state(state))
        held, what = self._signature(state)
        return StateMark(what, held)

    def copy(self) -> Any:
        """All of it."""
        return copy_tree(state_of(self.thing))

    def take(self, state: Any) -> None:
        """What ``copy`` was."""
        restore_object(self.thing, copy_tree(state))

    def was_found(self) -> bool:
        """Whether it was seen to be written since the last call."""
        found, self._found = self._found, False
        return found

    def cut(self) -> None:
        """The body is left: from here on all is kept."""
        if self.kept is None:
            self._behind = self.copy()

    def put_back(self) -> None:
        """What is kept."""
        state = self.kept if self.kept is not None else self._behind
        if state is not None:
            self.take(state)

    def _signature(self, state: Any = None) -> tuple[Any, list[Any]]:
        if self._dicts is not None:
            parts = [each for one in self._modules for each in one.values()]
            tensors = [each for one in self._dicts for each in one.values() if each is not None]
            return tensors, [*map(id, parts), *map(mark_of, tensors)]
        if state is None:
            state = state_of(self.thing)
        return state, list(marks_in(state))


def _parts_of(thing: Any) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]] | None]:
    """Where a module has its parts, and its tensors; None for one whose state is more than these, or for no module."""
    if not isinstance(thing, torch.nn.Module) or type(thing).state_dict is not torch.nn.Module.state_dict:
        return [], None
    modules = list(thing.modules())
    plain = torch.nn.Module
    for module in modules:
        kind = type(module)
        own = kind._save_to_state_dict is not plain._save_to_state_dict
        own = own or kind.get_extra_state is not plain.get_extra_state
        if own or module._state_dict_hooks or module._state_dict_pre_hooks:
            return [], None
    tensors: list[Mapping[str, Any]] = []
    for module in modules:
        tensors += [module._parameters, module._buffers]
    return [module._modules for module in modules], tensors


def mark_of(tensor: torch.Tensor) -> Mark:
    """Changes when torch writes to it, or it gets other memory. Not so where torch does not count."""
    if tensor.layout is not torch.strided or tensor.is_inference():
        return -1, id(tensor)
    return tensor._version, tensor.data_ptr()


def array_digest(array: np.ndarray[Any, Any]) -> int:
    """Of all its bytes."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0


def marks_in(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield mark_of(value)
    elif isinstance(value, np.ndarray):
        yield array_digest(value)
    elif isinstance(value, Mapping):
        yield len(value)
        for key, item in value.items():
            yield key
            yield from marks_in(item)
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for item in value:
            yield from marks_in(item)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[torch.Tensor | np.ndarray[Any, Any]]:
    """All tensors and arrays of a tree of state."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)) and not PLAIN.issuperset(map(type, value)):
        for item in value:
            yield from tensors_in(item)


def size_of(tensor: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """In bytes."""
    return tensor.nbytes


def is_small(state: Any) -> bool:
    """Or made up of values that can't be watched."""
    tensors = list(tensors_in(state))
    return len(tensors) <= _SMALL_LEAVES and sum(map(size_of, tensors)) <= _SMALL_BYTES


def _is_unwatchable(state: Any, again: Any) -> bool:
    """Whether torch does not count, or ``state_dict()`` copies: nothing of that tells what becomes of the original."""
    tensors = [each for each in tensors_in(state) if isinstance(each, torch.Tensor)]
    others = [each for each in tensors_in(again) if isinstance(each, torch.Tensor)]
    if any(each.layout is not torch.strided or each.is_inference() for each in tensors):
        return True
    return [each.data_ptr() for each in tensors] != [each.data_ptr() for each in others]


def digest_of_state(state: Any) -> str:
    """Of all of it, wherever it lies."""
    payload, tensors = flatten(state, BITS)
    parts = [tensor_digest(each) for each in tensors.values()]
    return "".join((xxhash.xxh3_128_hexdigest(payload), *parts))
