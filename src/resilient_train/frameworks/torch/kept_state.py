"""What replicas share, as the bodies of a window found it: a redo goes back to that, and a snapshot is of that.

Most of it is written by the update alone, when the bodies are over, and needs no copy. What a script writes before it
does:

* settings, schedulers and the scaler, and small state of the user's: always;
* a tensor that was once seen to be written by a body, or between the head of the loop and the body (the key encoder of
  MoCo, weights that are swapped for an evaluation): from the next window on. The copy takes no longer than to write it.

It is seen by torch's version counters and addresses, which cost 0.1 us a tensor. Both miss what is written in place to
``parameter.data``, so in the first windows of a process memory of the host is compared by digest as well.

What was written for the first time in the very window that a fault brings back is lost: see ``put_back``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import xxhash

from resilient_train.frameworks.roles import Objects, WrittenEarly
from resilient_train.frameworks.torch.fingerprint import tensor_digest
from resilient_train.frameworks.torch.leaves import TENSORS, copy_tree, is_sharded, restore_object, state_of
from resilient_train.state.tree import flatten

_LOOKED_AT = 2
"""So many windows are compared by digest: what a loop writes before its updates it writes each time, as a rule."""
_SMALL_BYTES, _SMALL_TENSORS = 64 << 10, 16
"""State of the user's that is at most so large is copied at each window, unasked."""

LIVES_ON = "resilient_lives_on"
"""An attribute of state that a process which lives on brings up to date by itself: it is not put back there."""

Mark = tuple[int, int]
"""A tensor's version, and where it lies."""
Key = tuple[int, str]
"""A parameter: the number of its model, its name there."""


class _Parameter(NamedTuple):
    key: Key
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """As checkpoints call it."""
        return f"model.{self.key[0]}.{self.key[1]}"


class _Large:
    """State of the user's that is not kept, because nobody has written it before an update."""

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing = f"state[{name!r}]", thing
        self.tensors: list[torch.Tensor] = []
        self.marks: list[Mark] = []
        self.digest = ""

    def mark(self, state: Any, *, digests: bool) -> None:
        """``state``: what it is; None: its tensors are the ones that they were."""
        if state is not None:
            self.tensors = [tensor for tensor in _tensors(state) if _can_be_watched(tensor)]
        self.marks = _marks(self.tensors)
        self.digest = _state_digest(state) if digests else ""


class KeptState:
    """Of the registered objects. A window is open from ``begin`` to ``forget``."""

    def __init__(self, objects: Objects) -> None:
        self._parameters = [
            _Parameter((index, name), parameter)
            for index, model in enumerate(objects.models)
            for name, parameter in model.named_parameters()
            if _can_be_watched(parameter)
        ]
        self._live = {each.key: each.tensor for each in self._parameters}
        self._extra = {name: thing for name, thing in objects.extra.items() if not getattr(thing, LIVES_ON, False)}
        self._early: dict[Key, torch.Tensor] = {}
        """The parameters that are written before updates, and ..."""
        self._copies: dict[Key, torch.Tensor] = {}
        """... what the window found in them. The memory is used again in each one."""
        self._early_states: set[str] = set()
        """The large states of the user's that are written early."""
        self._known: dict[str, _Large] = {}
        """The others, and ..."""
        self._large: dict[str, _Large] = {}
        """... those of them that the present window has no copy of."""
        self._states: dict[str, Any] = {}
        """What the window found the user's states to be, as far as they are kept."""
        self._behind: dict[str, Any] = {}
        """What the others were when the body was cut: code that stands behind it runs all the same."""
        self.small: dict[str, Any] = {}
        """Schedulers, scaler and settings, as the window found them (``State.small_copy``)."""
        self._windows = 0
        self._open = self._cut = self._sealed = False
        self._watched: list[_Parameter] = []
        self._tensors: list[torch.Tensor] = []
        self._marks: list[Mark] = []
        self._digests: list[str] = []
        self._lost: list[str] = []
        self._found: list[str] = []

    def begin(self, small: dict[str, Any], *, whole: bool = False) -> None:
        """All is as a window finds it. ``whole``: there is a reason to go back in this one, so all of it is kept."""
        self.small = small
        self._open, self._cut, self._sealed = True, False, False
        self._lost.clear()
        self._behind.clear()
        self._keep_parameters(self._live if whole else self._early)
        self._keep_states(whole=whole)
        self._watched = [each for each in self._parameters if each.key not in self._copies]
        self._tensors = [each.tensor for each in self._watched]
        self._mark(digests=self._windows < _LOOKED_AT)

    def _keep_parameters(self, wanted: Mapping[Key, torch.Tensor]) -> None:
        with torch.no_grad():
            for key, tensor in wanted.items():
                copy = self._copies.get(key)
                if copy is not None:
                    copy.copy_(tensor)
                    continue
                # Without memory for it the job goes on as before it was seen.
                with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
                    self._copies[key] = tensor.detach().clone()

    def _keep_states(self, *, whole: bool) -> None:
        self._states.clear()
        self._large.clear()
        first = self._windows < _LOOKED_AT
        for name, thing in self._extra.items():
            known = self._known.get(name)
            state = state_of(thing) if known is None or first or whole else None
            if known is None and name not in self._early_states and not _is_small(state):
                known = self._known[name] = _Large(name, thing)
            if known is None or whole:
                self._states[name] = copy_tree(state)
            else:
                known.mark(state, digests=first)
                self._large[name] = known

    def _mark(self, *, digests: bool) -> None:
        self._marks = _marks(self._tensors)
        self._digests = [_digest(tensor) for tensor in self._tensors] if digests else []

    def look(self) -> None:
        """The bodies have come to their end, or to where it matters what they have written."""
        if not self._open:
            return
        marks = _marks(self._tensors)
        if self._digests or marks != self._marks:
            self._look_at(marks)
        if not self._cut:
            for name, large in self._large.items():
                self._look_at_state(name, large)

    def _look_at(self, marks: list[Mark]) -> None:
        digests = self._digests or [""] * len(marks)
        for each, was, mark, digest in zip(self._watched, self._marks, marks, digests, strict=True):
            other = _digest(each.tensor) != digest if digest else mark != was
            if other:
                self._lost.append(each.name)
            if (other or mark != was) and not self._cut and each.key not in self._early:
                self._early[each.key] = each.tensor
                self._found.append(each.name)
        self._marks = marks

    def _look_at_state(self, name: str, large: _Large) -> None:
        marks = _marks(large.tensors)
        other = _state_digest(state_of(large.thing)) != large.digest if large.digest else marks != large.marks
        if other:
            self._lost.append(large.name)
        if (other or marks != large.marks) and name not in self._early_states:
            del self._known[name]
            self._early_states.add(name)
            self._found.append(large.name)

    def found(self) -> WrittenEarly | None:
        """What was seen since the last call."""
        if not self._found:
            return None
        names, self._found = self._found, []
        states = [state_of(self._extra[name]) for name in self._early_states]
        return WrittenEarly(names, sum(map(_size, _tensors([*self._early.values(), *states]))))

    def early_parameters(self) -> tuple[Key, ...]:
        """What is known to be written before updates, for a new process ..."""
        return tuple(self._early)

    def early_states(self) -> tuple[str, ...]:
        """... and of the user's large states."""
        return tuple(self._early_states)

    def learn(self, parameters: Iterable[Key], states: Iterable[str]) -> None:
        """What another process knew of them."""
        known = set(parameters)
        self._early.update({each.key: each.tensor for each in self._parameters if each.key in known})
        self._early_states.update(name for name in states if name in self._extra)
        for name in states:
            self._known.pop(name, None)

    @property
    def lost(self) -> str:
        """What was written since the window began, and was not kept; empty: nothing."""
        return self._lost[0] if self._lost else ""

    def cut(self) -> None:
        """The body is left, and its step will run again. What the script does behind it before is not to count."""
        if not self._open or self._cut:
            return
        self.look()
        self._cut = True
        self._behind = {name: copy_tree(state_of(large.thing)) for name, large in self._large.items()}
        self._mark(digests=True)

    def seal(self) -> None:
        """A copy of all is made, and is put back first. From here on the update writes."""
        self.look()
        self._cut = self._sealed = True
        self._watched, self._tensors, self._marks, self._digests = [], [], [], []

    def put_back(self) -> None:
        """The window begins again. ``lost`` tells whether that is possible."""
        if not self._open:
            return
        self.look()
        with torch.no_grad():
            for key, copy in self._copies.items():
                self._live[key].copy_(copy)
        for name, state in {**self._behind, **self._states}.items():
            restore_object(self._extra[name], copy_tree(state))

    def forget(self) -> None:
        """The update is applied, or all is to be a copy of a replica's."""
        self._windows += self._open
        self._open = False
        if len(self._copies) > len(self._early):
            self._copies = {key: copy for key, copy in self._copies.items() if key in self._early}

    def into(self, tree: dict[str, Any]) -> None:
        """Puts what is kept into a ``State.tree``: it is of what the window found then."""
        if not self._open or self._sealed:
            return
        for (index, name), copy in self._copies.items():
            tree["model"][index][name] = copy
        if "small" in tree:
            tree["small"] = {name: self.small[name] for name in tree["small"]}
            tree["extra"].update(self._states)


def _can_be_watched(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_sharded(tensor) and not tensor.is_inference()


def _marks(tensors: list[torch.Tensor]) -> list[Mark]:
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


def _digest(tensor: torch.Tensor) -> str:
    """Empty: it lies in the memory of a device, and would have to be copied from there."""
    return tensor_digest(tensor) if tensor.is_cpu else ""


def _state_digest(state: Any) -> str:
    payload, tensors = flatten(state, TENSORS)
    return "".join((xxhash.xxh3_128_hexdigest(payload), *map(_digest, tensors.values())))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _is_small(state: Any) -> bool:
    tensors = list(_tensors(state))
    return len(tensors) <= _SMALL_TENSORS and sum(map(_size, tensors)) <= _SMALL_BYTES


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
