"""What a loop changes between two bodies of one window: a learning rate, a module's mode, gradients that it scales.

``session.call`` runs the bodies of a window again by itself, without the code that stands between them. So what that
code has changed is kept, and is set again before the body that it was meant for. A change is seen by comparing what a
body has left with what the next one finds; tensors by their version counters, so that a copy is made of those only
that were written. Nothing is looked at in loops whose every body updates.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from resilient_train.frameworks.roles import StateMark
from resilient_train.frameworks.torch.containers import copy_tree
from resilient_train.frameworks.torch.kept_state import KeptState, can_be_watched
from resilient_train.frameworks.torch.leaves import is_sharded, local, restore_object, state_of
from resilient_train.frameworks.torch.module_values import HeldValues
from resilient_train.frameworks.torch.rank_state import TorchRankState
from resilient_train.frameworks.torch.state import TorchState
from resilient_train.frameworks.torch.watched_state import marks_in

Put = Callable[[], object]
"""Sets something again."""
Holder = dict[str, Any]
"""A module's parameters or its buffers, by name."""


class _Part(NamedTuple):
    """``mark``: what it is now, to be compared. ``keep``: a copy of it, in what sets it again."""

    mark: Callable[[], StateMark]
    keep: Callable[[], Put]


class BetweenBodies:
    """See ``frameworks/roles.Between``."""

    def __init__(self, models: Sequence[torch.nn.Module], state: TorchState, rank_state: TorchRankState) -> None:
        wrappers = (each for model in models for each in model.modules() if isinstance(each, DistributedDataParallel))
        self._made = [(wrapper, wrapper.require_backward_grad_sync) for wrapper in wrappers]
        self._torchs = _torchs_values(state.kept)
        self._modes = _modes(state.kept)
        self._parts = [self._torchs, self._modes, *_parts(state, rank_state)]
        self._tensors = _Tensors(state.kept)
        self._left: tuple[list[StateMark], _Seen] | None = None
        self._next = 0
        """The place of the body that comes behind the one that has left this."""
        self._before: dict[int, list[Put]] = {}
        """By the place of a body: what sets again what was changed before it."""
        self._torchs_first: Put | None = None
        """The same of torch's modules and the first body: they are in no window, as bodies don't change them."""

    def left(self, place: int) -> None:
        self._left, self._next = ([part.mark() for part in self._parts], self._tensors.seen()), place + 1
        if not place and self._torchs_first is None:
            self._torchs_first = self._torchs.keep()

    def modes(self) -> Put:
        return self._modes.keep()

    def head_is_repeated(self) -> None:
        for wrapper, reduces in self._made:
            wrapper.require_backward_grad_sync = reduces

    def look(self) -> None:
        if self._left is None:
            return
        (marks, seen), self._left = self._left, None
        pairs = zip(self._parts, marks, strict=True)
        puts = [part.keep() for part, mark in pairs if not part.mark().same(mark)]
        self._before[self._next] = [*puts, *self._tensors.changed_since(seen)]

    def begins(self, place: int, *, again: bool) -> None:
        if not place:
            if not again:
                self._before.clear()
                self._torchs_first = None
            elif self._torchs_first is not None:
                self._torchs_first()
        for put in self._before.get(place, ()):
            put()
        self.look()


def _kept(held: Callable[[], Any], put: Callable[[Any], object]) -> Callable[[], Put]:
    def keep() -> Put:
        value = held()
        return lambda: put(value)

    return keep


def _torchs_values(kept: KeptState) -> _Part:
    """Of torch's own modules, a dropout's rate: the loop sets them."""

    def held() -> HeldValues:
        return kept.values.held_of_torchs()

    def put(was: HeldValues) -> None:
        kept.values.put_back(was)

    return _Part(lambda: StateMark(held().values), _kept(held, put))


def _modes(kept: KeptState) -> _Part:
    def mark() -> StateMark:
        now = kept.modes_now()
        return StateMark((now[:-1], id(now.values.read), now.values.values), now)

    return _Part(mark, _kept(kept.modes_now, kept.put_modes))


def _parts(state: TorchState, rank_state: TorchRankState) -> Iterator[_Part]:
    """All else but tensors of models."""

    def put_entries(entries: dict[str, bytes]) -> None:
        for name, entry in entries.items():
            rank_state.restore_entry(name, entry)

    def settings() -> StateMark:
        small, groups = state.small_tree(), state.groups()
        return StateMark(([*marks_in(small)], [[[*map(id, group)] for group in each] for each in groups]), small)

    yield _Part(settings, _kept(state.small_copy, state.restore_small))
    yield _Part(lambda: StateMark(rank_state.entries()), _kept(rank_state.entries, put_entries))
    yield _Part(
        lambda: StateMark(torch.is_grad_enabled()),
        _kept(torch.is_grad_enabled, torch.set_grad_enabled),
    )
    for watched in state.kept.states:
        thing = watched.thing
        yield _Part(
            watched.mark,
            _kept(
                lambda thing=thing: copy_tree(state_of(thing)),  # type: ignore[misc]
                lambda held, thing=thing: restore_object(thing, copy_tree(held)),  # type: ignore[misc]
            ),
        )


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

    def is_as(self, other: _Seen) -> bool:
        """Whether nothing was changed between the two."""
        return (
            self.slots is other.slots
            and self.written == other.written
            and all(map(operator.is_, self.gradients, other.gradients))
            and self.gradients_written == other.gradients_written
        )

    def each(self) -> dict[tuple[int, str], tuple[_Slot, tuple[int, int], torch.Tensor | None, int]]:
        """By place."""
        rows = zip(self.slots, self.written, self.gradients, self.gradients_written, strict=True)
        return {(id(row[0].holder), row[0].name): row for row in rows}


class _Tensors:
    """The models' parameters, their gradients, and buffers."""

    def __init__(self, kept: KeptState) -> None:
        self._kept = kept
        self._there: list[torch.Tensor | None] = []
        self._slots: list[_Slot] = []
        """What can be watched of these."""
        self._tensors: list[torch.Tensor] = []

    def seen(self) -> _Seen:
        """Takes some 2 us a tensor."""
        holders = [each for module in self._kept.modules() for each in (module._parameters, module._buffers) if each]
        there = [each for holder in holders for each in holder.values()]
        if len(there) != len(self._there) or not all(map(operator.is_, there, self._there)):
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
        )

    def changed_since(self, before: _Seen) -> Iterator[Put]:
        """What sets again each of them that was changed."""
        now = self.seen()
        if now.is_as(before):
            return
        was = before.each()
        for place, (slot, written, gradient, gradient_written) in now.each().items():
            old, old_written, old_gradient, old_gradient_written = was.pop(place, (slot, None, None, -1))
            if is_sharded(old.tensor) != is_sharded(slot.tensor):
                continue  # FSDP has gathered it for a forward pass, or divided it again
            if old.tensor is not slot.tensor or old_written != written:
                yield _putting(slot)
            if gradient is not old_gradient or gradient_written != old_gradient_written:
                yield _putting_gradient(slot.tensor, gradient)
        for slot, *_ in was.values():
            yield functools.partial(slot.holder.pop, slot.name, None)


def _putting(slot: _Slot) -> Put:
    holder, name, tensor = slot
    copy = local(tensor).clone()

    def put() -> None:
        holder[name] = tensor
        _write(tensor, copy)

    return put


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
