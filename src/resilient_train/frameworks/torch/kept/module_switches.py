"""What a loop may switch at a wrapper of its model while it runs: whether gradients are reduced, above all.

``no_sync`` of DDP is an attribute; ``set_requires_gradient_sync`` of a module that ``fully_shard`` was called on, and
its like, set attributes of objects behind it. A redo that began with others would reduce other sums, or call other
collectives than the other ranks. Not here: what a script gives as an object of its own (``set_custom_all_gather``,
``set_all_reduce_hook``), and a group that is made (``set_separate_reduce_scatter_group``); they belong in front of the
loop, where a new process comes by as well.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from resilient_train.frameworks.torch.sharding.sharded import is_fsdp

_OF_STATE = ("_auto_reshard_after_forward", "_states_to_forward_prefetch", "_states_to_backward_prefetch")
_OF_GROUP = (
    *("reduce_grads", "all_reduce_grads", "reshard_after_backward", "gradient_divide_factor"),
    *("reduce_scatter_unused_params", "force_sum_reduction_for_comms", "unshard_async_op", "unshard_in_backward"),
)
_MESH = "post_forward_mesh_info"
"""Of a group: over which ranks its parameters are divided behind the forward pass; None: they stay whole."""
_MANUAL = ("manual_backward_finalization", "require_manual_backward_finalization")
"""From torch 2.15 on, of FSDP's context and of DDP: whether the loop itself ends backward passes."""
_read_state = operator.attrgetter("_is_root", "_state_ctx.is_last_backward", *_OF_STATE)
_read_group = operator.attrgetter(_MESH, *_OF_GROUP)

Held = list[Any]
"""What all of them were, by the order of the models' modules."""


class Switched(msgspec.Struct, array_like=True, frozen=True):
    """What one module's are, for another process. ``forward`` and ``backward`` are numbers of the modules whose
    parameters are gathered ahead; a group says behind ``_MESH`` (all of its ranks, or not at all; None: as the script
    has made it) what it has of ``_OF_GROUP``.
    """

    reduces: bool = True
    last: bool = True
    automatic: bool | None = None
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    groups: tuple[tuple[bool | int | float | None, ...], ...] = ()
    manual: bool = False


class ModuleSwitches:
    """Of all modules of the models that have some."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        modules = [module for model in models for module in model.modules()]
        self._wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
        states = {id(state): state for module in modules if is_fsdp(module) for state in (_state_of(module),)}
        self._states = list(states.values())
        self._number = {each: number for number, each in enumerate(states)}

    def held(self) -> Held:
        """Takes less than 1 us for each module of FSDP's."""
        found: Held = [(wrapper.require_backward_grad_sync, _is_manual(wrapper)) for wrapper in self._wrappers]
        for each in self._states:
            own = (*_read_state(each), _is_manual(each._state_ctx))
            found.append((own, [*map(_read_group, each._fsdp_param_groups)]))
        return found

    def put_back(self, held: Held) -> None:
        """What ``held`` was, behind a body that may have been cut. The buckets are laid out next."""
        for wrapper, (_, manual) in zip(self._wrappers, held, strict=False):
            if _is_manual(wrapper) is not manual:
                wrapper.reducer._reset_state()  # torch refuses to switch in the middle of a pass
        self._set(held)

    def _set(self, held: Held) -> None:
        count = len(self._wrappers)
        for wrapper, (reduces, manual) in zip(self._wrappers, held[:count], strict=True):
            wrapper.require_backward_grad_sync = reduces
            _set_manual(wrapper, manual)
        # Of one model all have one context from the first forward pass on, which is that of the outermost module: so
        # this one comes last.
        for state, (own, groups) in reversed([*zip(self._states, held[count:], strict=True)]):
            was_root, state._state_ctx.is_last_backward, *values, manual = own
            _set_manual(state._state_ctx, manual)
            for name, value in zip(_OF_STATE, values, strict=True):
                setattr(state, name, value)
            for group, (mesh, *switches) in zip(state._fsdp_param_groups, groups, strict=True):
                # As the first forward pass has it, if that came after: there will be no other one.
                begun = was_root is None and state._is_root and state._auto_reshard_after_forward
                group.post_forward_mesh_info = None if begun else mesh
                for name, value in zip(_OF_GROUP, switches, strict=True):
                    setattr(group, name, value)

    def told(self, held: Held) -> tuple[Switched, ...]:
        """``held`` for another process."""
        count = len(self._wrappers)
        return (
            *(Switched(reduces, manual=manual) for reduces, manual in held[:count]),
            *(self._told(state, *each) for state, each in zip(self._states, held[count:], strict=True)),
        )

    def _told(self, state: Any, own: tuple[Any, ...], groups: list[Any]) -> Switched:
        root, last, automatic, forward, backward, manual = own
        manual = manual and root is not False  # torch refuses it of an inner module, before the first pass
        pairs = zip(state._fsdp_param_groups, groups, strict=True)
        switches = tuple((_all_or_none(group, mesh), *rest) for group, (mesh, *rest) in pairs)
        return Switched(True, last, automatic, self._numbers(forward), self._numbers(backward), switches, manual)

    def _numbers(self, states: list[Any]) -> tuple[int, ...]:
        return tuple(self._number[id(each)] for each in states)

    def take(self, told: Sequence[Switched]) -> None:
        """Those of another process, which has built the same models."""
        held = self.held()
        count = len(self._wrappers)
        of_ddp: Held = [(each.reduces, each.manual) for each in told[:count]]
        self._set(of_ddp + [self._taken(*each) for each in zip(self._states, held[count:], told[count:], strict=True)])

    def _taken(self, state: Any, held: tuple[Any, ...], told: Switched) -> tuple[Any, ...]:
        ahead = ([self._states[number] for number in some] for some in (told.forward, told.backward))
        (is_root, *_), groups = held
        triples = zip(state._fsdp_param_groups, groups, told.groups, strict=True)
        taken = [(_mesh_of(group, mesh, whole), *rest) for group, (mesh, *_), (whole, *rest) in triples]
        return (is_root, told.last, told.automatic, *ahead, told.manual), taken


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def _is_manual(holder: Any) -> bool:
    one, other = _MANUAL
    return getattr(holder, one, False) or getattr(holder, other, False)


def _set_manual(holder: Any, manual: bool) -> None:
    for name in _MANUAL:
        if getattr(holder, name, manual) is not manual:
            setattr(holder, name, manual)


def _all_or_none(group: Any, mesh: Any) -> bool | None:
    if mesh is None:
        return False
    return True if mesh is group.mesh_info else None


def _mesh_of(group: Any, own: Any, told: Any) -> Any:
    """The inverse; ``own`` is what the script has made here."""
    return own if told is None else group.mesh_info if told else None
