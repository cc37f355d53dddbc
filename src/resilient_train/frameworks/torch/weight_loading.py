"""Functions by which a script fills a divided model before its loop: they hand out whole tensors, rank 0's mostly.

A rank gets all of a tensor, and copies its part of it into a parameter. Such a result is not kept, large as it is: what
it was for comes from a replica, if that is registered. Others' frames tell what it was for, since the collective does
not. A function that is not known, or has another name one day, is refused as any other code is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch

from resilient_train.frameworks.torch.own_objects import of_objects
from resilient_train.frameworks.torch.storages import Memory, holds, memory_of

_FUNCTIONS = {
    ("torch.distributed.checkpoint.state_dict", "_load_model_state_dict"): "model",
    ("torch.distributed.checkpoint.state_dict", "_load_optim_state_dict"): "optim",
    ("", "fsdp2_load_full_state_dict"): "model",  # accelerate's, and what other libraries put in its place
    ("torch.distributed.tensor._api", "distribute_tensor"): "",
}
"""By module and name, and the variable in which each has what it fills; empty: it returns a tensor, for anything."""


class Filled(NamedTuple):
    """What is being filled. None: that is not known."""

    thing: weakref.ref[Any] | None

    @property
    def kind(self) -> str:
        """Its class; empty: it is gone, or not known."""
        thing = self.thing() if self.thing is not None else None
        return "" if thing is None else type(thing).__qualname__

    def is_in(self, held: Memory) -> bool:
        """Whether all of it lies there."""
        thing = self.thing() if self.thing is not None else None
        if isinstance(thing, torch.nn.Module):
            return holds(held, memory_of([*thing.parameters(), *thing.buffers()]))
        if isinstance(thing, torch.optim.Optimizer):
            values = (each for state in thing.state.values() for each in state.values())
            return holds(held, memory_of(each for each in values if isinstance(each, torch.Tensor)))
        return False


def filled() -> Filled | None:
    """What the collective that is being called is for; None: the script's own use."""
    if of_objects():
        return None  # the names of the tensors, which it needs
    unknown: Filled | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        function = frame.f_code.co_name
        name = _FUNCTIONS.get((frame.f_globals.get("__name__", ""), function), _FUNCTIONS.get(("", function)))
        if name and isinstance(thing := frame.f_locals.get(name), (torch.nn.Module, torch.optim.Optimizer)):
            return Filled(weakref.ref(thing))
        if name == "":
            unknown = Filled(None)
        frame = frame.f_back
    return unknown


def spoil(tensors: Iterable[torch.Tensor]) -> None:
    """Of a result that a process has not got: what is made of it besides what it was for can be seen, as a rule."""
    for each in tensors:
        if each.is_floating_point() or each.is_complex():
            each.fill_(torch.nan)
        elif each.dtype is not torch.bool:
            each.fill_(torch.iinfo(each.dtype).min)
