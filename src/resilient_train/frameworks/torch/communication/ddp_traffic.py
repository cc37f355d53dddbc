"""What DistributedDataParallel communicates by itself: its constructor, the buffers in a forward pass, the gradients.

All of it goes into the tensors of the wrapped module and their gradients, so it does not matter what a process gets of
it whose state comes from a replica, as long as that module is registered. What is computed of them before the loop is
another matter (``set_up.py``).
"""

from __future__ import annotations

import enum
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from resilient_train.frame_variables import variables
from resilient_train.frameworks.torch.kept.buffers import same_bits
from resilient_train.frameworks.torch.tensors.storages import Memory, holds, memory_of
from resilient_train.script_place import line

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep  # noqa: PTH120 - names in code are text
_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - likewise
_STDLIB = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120 - likewise
_INSTALLED = ("site-packages", "dist-packages")
_DDP = DistributedDataParallel.forward.__code__.co_filename
_HOOKS = f"{_TORCH}distributed/algorithms/ddp_comm_hooks/"
_AUTOGRAD = f"{_TORCH}autograd/graph.py"
_Others = list[torch.Tensor] | None
_SYNC_BUFFERS = DistributedDataParallel._sync_module_buffers.__code__


class Traffic(enum.Enum):
    """Whose collective is being called."""

    OTHER = enum.auto()
    """The script's, or another library's."""
    CONSTRUCTOR = enum.auto()
    """DDP's, as a wrapper is made: it compares the parameters' shapes, and hands out its first rank's module."""
    PASS = enum.auto()
    """DDP's, of a forward or backward pass."""


class _Wrapped(NamedTuple):
    """A module that a wrapper has communicated for, and its memory then."""

    place: str
    module: weakref.ref[torch.nn.Module]
    memory: Memory | None


class DdpTraffic:
    """The wrappers of this process, as they are heard of."""

    def __init__(self) -> None:
        self._wrappers: weakref.WeakKeyDictionary[DistributedDataParallel, str] = weakref.WeakKeyDictionary()
        """And where each was heard of first."""
        self._heard_of_any = False
        self._unchecked: list[_Wrapped] = []

    def of_call(self) -> Traffic:
        """Whose the collective is that is being called. DDP's is what nobody behind it has called."""
        frame: FrameType | None = sys._getframe(1)
        direct = True
        while frame is not None:
            name = frame.f_code.co_filename
            if name == _DDP:
                wrapper = variables(frame).get("self")
                if isinstance(wrapper, DistributedDataParallel):
                    self._hear_of(wrapper)
                    return Traffic.CONSTRUCTOR if _in_constructor(frame) else Traffic.PASS
            elif name.startswith(_HOOKS) or (direct and name == _AUTOGRAD):
                break  # the reducer, which is in C++
            elif not name.startswith((_PACKAGE, _TORCH)) and _is_elsewhere(name):
                return Traffic.OTHER
            direct = direct and name.startswith(_PACKAGE)
            frame = frame.f_back
        # No frame is left in a thread of autograd's, in which nothing else of Python runs.
        return Traffic.PASS if self._heard_of_any else Traffic.OTHER

    def bucket(self) -> torch.Tensor | None:
        """The gradients that a communication hook is given whose collective is being called."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            for each in variables(frame).values():
                if isinstance(each, GradBucket):
                    return each.buffer()
            frame = frame.f_back
        return None

    def _hear_of(self, wrapper: DistributedDataParallel) -> None:
        if wrapper in self._wrappers:
            return
        module = wrapper.module
        self._wrappers[wrapper] = place = line()
        self._heard_of_any = True
        self._unchecked.append(_Wrapped(place, weakref.ref(module), memory_of(_all(module))))

    def unregistered(self, registered: Callable[[], Memory]) -> str:
        """The place of a wrapper around what is not registered; empty if there is none. Each is looked at once."""
        unchecked, self._unchecked = self._unchecked, []
        held = registered() if unchecked else frozenset()
        for wrapped in unchecked:
            module = wrapped.module()
            now = memory_of(_all(module)) if module is not None else None
            if not (holds(held, wrapped.memory) or holds(held, now)):
                return wrapped.place
        return ""

    def left_out(self, registered: Sequence[DistributedDataParallel], models: Sequence[torch.nn.Module]) -> str:
        """The place of a wrapper that is none of the ``registered`` ones, and averages what is in ``models``; empty if
        there is none.
        """
        averaged = {id(each) for wrapper in registered for each in wrapper.parameters()}
        alone = {id(each) for model in models for each in model.parameters()} - averaged
        for wrapper, place in self._wrappers.items():
            if wrapper not in registered and any(id(each) in alone for each in wrapper.parameters()):
                return place
        return ""


def synced() -> DistributedDataParallel | None:
    """The wrapper that gives one rank's buffers to all, as each does in front of a forward pass, if the broadcast that
    is being called is that: they are the same ones, whatever the inputs are.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _SYNC_BUFFERS:
            wrapper: DistributedDataParallel = variables(frame)["self"]
            return wrapper
        frame = frame.f_back
    return None


def coalesced(
    wrapper: DistributedDataParallel, given: torch.Tensor, others: Callable[[Sequence[torch.Tensor]], _Others]
) -> torch.Tensor | None:
    """What ``given``, which DDP has made of some of its buffers to broadcast it, is of ``others`` in their places. None
    if that can't be told.
    """
    buffers, distributed = wrapper.modules_buffers, cast("Any", dist)
    parts, _ = distributed._compute_bucket_assignment_by_size(buffers, [wrapper.broadcast_bucket_size])
    for part in parts:
        mine = [buffers[index] for index in part]
        if same_bits(_one(mine), given):
            theirs = others(mine)
            return _one(theirs) if theirs is not None else None
    return None


def _one(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """As C++'s ``broadcast_coalesced`` lays them out."""
    return torch.cat([each.detach().reshape(-1) for each in buffers])


def _in_constructor(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename == _DDP:
        if frame.f_code is DistributedDataParallel.__init__.__code__:
            return True
        frame = frame.f_back
    return False


def _is_elsewhere(name: str) -> bool:
    return not name.startswith(_STDLIB) or any(part in name for part in _INSTALLED)


def _all(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
