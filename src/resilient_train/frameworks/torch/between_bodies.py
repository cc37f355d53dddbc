"""What a loop changes between two bodies of one window: a learning rate, a module's mode, gradients that it scales.

``session.call`` runs the bodies of a window again by itself, without the code that stands between them. So what that
code has changed is kept, and is set again before the body that it was meant for. A change is seen by comparing what a
body has left with what the next one finds; tensors by their version counters, so that a copy is made of those only
that were written (and, in the first windows, by digests, since what is written to ``tensor.data`` counts nowhere).
Nothing is looked at in loops whose every body updates.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from resilient_train.frameworks.roles import Objects, StateMark
from resilient_train.frameworks.torch.kept.kept_state import (
    KeptState,
    are_alike,
    can_be_watched,
    digest_of_host,
)
from resilient_train.frameworks.torch.kept.module_entries import same_objects
from resilient_train.frameworks.torch.kept.optimizer_states import OptimizerState, first_written
from resilient_train.frameworks.torch.kept.watched_state import marks_in
from resilient_train.frameworks.torch.rank_state import TorchRankState
from resilient_train.frameworks.torch.state import TorchState
from resilient_train.frameworks.torch.tensors.leaves import is_sharded, local, memory_of

Put = Callable[[], object]
"""Sets something again."""
Holder = dict[str, Any]
"""A module's parameters or its buffers, by name."""
Place = tuple[int, str]
"""The ``id`` of a holder, and a name in it."""


class _Part(NamedTuple):
    """``mark``: what it is now, to be compared. ``keep``: a copy of it, in what sets it again."""

    mark: Callable[[], StateMark]
    keep: Callable[[], Put]


class BetweenBodies:
    """See ``frameworks/roles.Between``."""

    def __init__(self, objects: Objects, state: TorchState, rank_state: TorchRankState) -> None:
        modules = [each for model in objects.models for each in model.modules()]
        wrappers = [each for each in modules if isinstance(each, DistributedDataParallel)]
        self._made = [(wrapper, wrapper.require_backward_grad_sync) for wrapper in wrappers]
        self._optimizers = objects.optimizers
        self._modes = _modes(state.kept)
        self._parts = [_modules(state.kept), self._modes, *_parts(state, rank_state)]
        self._tensors = _Tensors(state.kept)
        self._left: tuple[list[StateMark], _Seen] | None = None
        self._base = self._next = -1
        """The step with which the window began; the place of the body that comes behind the one that has left this."""
        self._before: dict[int, list[Put]] = {}
        """By the place of a body: what sets again what was changed before it."""
        self._wrote_tensors = False
        self._optimizers_found: list[OptimizerState] = []

    def left(self, place: int) -> None:
        self._left, self._next = ([part.mark() for part in self._parts], self._tensors.seen()), place + 1

    def look(self) -> None:
        # Behind a body that has run again nothing was changed since, and what is known is not set again yet.
        left, self._left = self._left, None
        if left is None or self._next in self._before:
            return
        marks, seen = left
        pairs = zip(self._parts, marks, strict=True)
        puts = [part.keep() for part, mark in pairs if not part.mark().same(mark)]
        tensors = [*self._tensors.changed_since(seen)]
        # In front of the first body none has computed anything that could be wrong.
        self._wrote_tensors = self._wrote_tensors or (bool(tensors) and self._next > 0)
        self._before[self._next] = [*puts, *tensors]

    def begins(self, place: int, base: int) -> bool:
        if base != self._base:
            self._base = base
            self._before.clear()
            self._wrote_tensors = False
        for put in self._before.get(place, ()):
            put()
        self.look()
        return self._wrote_tensors

    def modes(self) -> Put:
        return self._modes.keep()

    def head_is_repeated(self) -> None:
        for wrapper, reduces in self._made:
            wrapper.require_backward_grad_sync = reduces
        self._optimizers_found = [*map(OptimizerState.of, self._optimizers)]

    def written_in_head(self) -> str:
        return first_written(self._optimizers, self._optimizers_found)


def _kept(held: Callable[[], Any], put: Callable[[Any], object]) -> Callable[[], Put]:
    def keep() -> Put:
        value = held()
        return lambda: put(value)

    return keep


def _modules(kept: KeptState) -> _Part:
    """Which module is where."""
    return _Part(lambda: StateMark([*map(id, now := kept.parts_now())], now), _kept(kept.parts_now, kept.put_parts))


def _modes(kept: KeptState) -> _Part:
    def mark() -> StateMark:
        now = kept.modes_now()
        return StateMark((now[:-1], id(now.values.read), now.values.values), now)

    return _Part(mark, _kept(kept.modes_now, kept.put_modes))


def _parts(state: TorchState, rank_state: TorchRankState) -> Iterator[_Part]:
    """All else but tensors of models."""

    def settings() -> StateMark:
        small, groups = state.small_tree(), state.groups()
        return StateMark(([*marks_in(small)], [[[*map(id, group)] for group in each] for each in groups]), small)

    yield _Part(settings, _kept(state.small_copy, state.restore_small))
    yield _Part(lambda: StateMark(rank_state.without_buffers()), _kept(rank_state.without_buffers, rank_state.put_own))
    yield _Part(lambda: StateMark(torch.is_grad_enabled()), _kept(torch.is_grad_enabled, torch.set_grad_enabled))
    for watched in state.kept.states:
        yield _Part(watched.mark, _kept(watched.copy, watched.take))


class _Slot(NamedTuple):
    """Where a module has a parameter or a buffer."""

    holder: Holder
    name: str
    tensor: torch.Tensor


class _Seen(NamedTuple):
    """Of some slots: which version of what is in them, and the gradients of those that have one. Tensors are kept, so
    that nothing else comes to lie where they do.
    """

    slots: list[_Slot]
    written: list[tuple[int, int]]
    gradients: list[torch.Tensor | None]
    gradients_written: list[int]
    digests: list[str] | None
    """Of all of these and all of those, in the first windows."""

    def is_as(self, other: _Seen) -> bool:
        """Whether nothing was changed between the two."""
        return (
            self.slots is other.slots
            and self.written == other.written
            and all(map(operator.is_, self.gradients, other.gradients))
            and self.gradients_written == other.gradients_written
            and (None in (self.digests, other.digests) or self.digests == other.digests)
        )

    def each(self) -> dict[Place, _Row]:
        digests = self.digests or [""] * (2 * len(self.slots))
        columns = self.slots, self.written, digests, self.gradients, self.gradients_written, digests[len(self.slots) :]
        rows = itertools.starmap(_Row, zip(*columns, strict=False))
        return {(id(row.slot.holder), row.slot.name): row for row in rows}


class _Row(NamedTuple):
    """Of one slot."""

    slot: _Slot
    written: tuple[int, int]
    digest: str
    gradient: torch.Tensor | None
    gradient_written: int
    gradient_digest: str

    def is_as(self, other: _Row) -> bool:
        return self.slot.tensor is other.slot.tensor and self.written == other.written

    def has_gradient_of(self, other: _Row) -> bool:
        return self.gradient is other.gradient and self.gradient_written == other.gradient_written


class _Tensors:
    """The models' parameters, their gradients, and buffers."""

    def __init__(self, kept: KeptState) -> None:
        self._kept = kept
        self._there: list[torch.Tensor | None] = []
        self._slots: list[_Slot] = []
        """What can be watched of these."""
        self._tensors: list[torch.Tensor] = []
        self._silent: set[Place] = set()
        """What was seen to be written past the version counters (``tensor.data``), and ..."""
        self._silent_gradients: set[Place] = set()
        """... whose gradients: copied each time, from then on."""

    def seen(self) -> _Seen:
        """Takes some 2 us a tensor, and in the first windows as long as it takes to read all of them."""
        holders = [each for module in self._kept.modules() for each in (module._parameters, module._buffers) if each]
        there = [each for holder in holders for each in holder.values()]
        if not same_objects(there, self._there):
            self._there = there
            self._slots = [
                _Slot(holder, name, each)
                for holder in holders
                for name, each in holder.items()
                if each is not None and can_be_watched(each)
            ]
            self._tensors = [slot.tensor for slot in self._slots]
        version, tensors = self._kept.version, self._tensors
        gradients = [each.grad if each.is_leaf else None for each in tensors]
        return _Seen(
            self._slots,
            [*zip(map(version, tensors), map(self._kept.address, tensors), strict=True)],
            gradients,
            [-1 if each is None else version(each) for each in gradients],
            [*map(_digest_of, (*tensors, *gradients))] if self._kept.looks_closely else None,
        )

    def changed_since(self, before: _Seen) -> Iterator[Put]:
        """What sets again each of them that was changed."""
        now = self.seen()
        if now.is_as(before) and not self._silent and not self._silent_gradients:
            return
        was, rows = before.each(), now.each()
        holders: set[int] = set()
        for place, row in rows.items():
            old = was.pop(place, None)
            if old is not None and is_sharded(old.slot.tensor) != is_sharded(row.slot.tensor):
                continue  # FSDP has gathered it for a forward pass, or divided it again
            if old is not None and now.digests is not None and before.digests is not None:
                self._learn(place, old, row)
            if old is None or not row.is_as(old) or place in self._silent:
                holders.add(place[0])
            if place in self._silent_gradients or not (
                row.gradient is None if old is None else row.has_gradient_of(old)
            ):
                yield _putting_gradient(row.slot.tensor, row.gradient)
        # BatchNorm's kernel writes past the counters, but for that of its passes: so all of one module.
        yield from (_putting(row.slot) for place, row in rows.items() if place[0] in holders)
        for row in was.values():
            yield _taking_out(row.slot)

    def _learn(self, place: Place, old: _Row, row: _Row) -> None:
        if row.is_as(old) and row.digest != old.digest:
            self._silent.add(place)
        if row.has_gradient_of(old) and row.gradient_digest != old.gradient_digest:
            self._silent_gradients.add(place)


def _digest_of(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None or tensor.layout is not torch.strided else digest_of_host(local(tensor))


def _putting(slot: _Slot) -> Put:
    holder, name, tensor = slot
    copy = local(tensor).clone()

    def put() -> None:
        holder[name] = tensor
        if are_alike(copy, local(tensor)):
            _write(tensor, copy)
        else:  # its ``data`` is another one
            memory_of(tensor).data = copy.clone()

    return put


def _taking_out(slot: _Slot) -> Put:
    """None stands there now, or there is no such name any more."""
    holder, name, _ = slot
    if name in holder:
        return functools.partial(holder.__setitem__, name, None)
    return functools.partial(holder.pop, name, None)


def _putting_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> Put:
    copy = None if gradient is None else gradient.detach().clone()

    def put() -> None:
        if copy is None or parameter.grad is None:
            parameter.grad = None if copy is None else copy.clone()
        else:  # in its memory: that may be a bucket of DDP's
            _write(parameter.grad, copy)

    return put


def _write(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.no_grad():
        local(tensor).copy_(local(copy))
