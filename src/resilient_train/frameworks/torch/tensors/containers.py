"""Trees of state whose containers are of classes of their own: a scheduler of torch's counts its milestones in a
``Counter``, and what a module gives as its state has the versions of its parts in an attribute.

Who takes up a state may ask for both, so a copy has them. What comes from another process, or from storage, comes as
plain dicts, lists and tuples (``state/tree.py``). It is dressed as the receiver's own state is, so nothing is ever
unpickled, and no class is called by a name that somebody sends.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch

from resilient_train.frameworks.torch.tensors.leaves import PLAIN

_BASES: tuple[type, ...] = (OrderedDict, defaultdict, dict, list, torch.Size, tuple)
"""What makes an empty container of a class that is derived from it. Its own constructor may want anything."""


def copy_tree(value: Any) -> Any:
    """A copy of a tree of state whose tensors and containers are its own."""
    kind = type(value)
    if kind in PLAIN:  # nearly all of it; asking whether a float is a Mapping takes a microsecond
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        copies = {key: copy_tree(item) for key, item in value.items()}
        return _as(value, copies) if isinstance(value, dict) else copies
    if isinstance(value, tuple):
        return _as(value, tuple([copy_tree(item) for item in value]))
    if isinstance(value, list):
        return _as(value, list(value) if PLAIN.issuperset(map(type, value)) else [copy_tree(item) for item in value])
    return value.copy(order="K") if isinstance(value, np.ndarray) else value


def dressed(value: Any, own: Any) -> Any:
    """``value``, its plain containers as those of ``own`` that stand in the same places."""
    if type(value) is dict and isinstance(own, dict):
        return _as(own, {key: dressed(item, dict.get(own, key)) for key, item in value.items()})
    if type(value) is list and isinstance(own, list):
        return _as(own, _dressed(value, own))
    if type(value) is tuple and isinstance(own, tuple):
        return _as(own, tuple(_dressed(value, own)))
    return value


def worn(value: Any) -> Any:
    """The containers of ``value`` without what they hold, for ``dressed``. None where all are plain ones."""
    if isinstance(value, dict):
        held = {key: each for key, item in value.items() if (each := worn(item)) is not None}
        return _as(value, held) if held or type(value) is not dict else None
    if not isinstance(value, (list, tuple)):
        return None
    # A torch.Size takes numbers only, so what is no container and holds no memory stays where it is.
    held_here = [item if type(item) in PLAIN else worn(item) for item in value]
    if type(value) in {list, tuple} and not any(isinstance(item, (dict, list, tuple)) for item in held_here):
        return None
    return _as(value, held_here if isinstance(value, list) else tuple(held_here))


def _dressed(values: Iterable[Any], own: list[Any] | tuple[Any, ...]) -> list[Any]:
    return [dressed(item, own[index] if index < len(own) else None) for index, item in enumerate(values)]


def _as(model: Any, items: Any) -> Any:
    """A container of the class of ``model``, with its attributes, that holds ``items``, which is a plain one."""
    kind = type(model)
    if kind is type(items):
        return items
    base = cast("Any", next(each for each in kind.__mro__ if each in _BASES))
    if isinstance(items, tuple):
        try:
            made = base.__new__(kind, items)
        except TypeError:  # one that torch's C++ returns, of named results: it reads as a plain one does
            return items
    else:
        made = base.__new__(kind)
        if isinstance(made, defaultdict):
            made.default_factory = model.default_factory
        if isinstance(items, list):
            base.extend(made, items)
        else:
            for key, item in items.items():
                base.__setitem__(made, key, item)
    _take_attributes(made, model)
    return made


def _take_attributes(made: Any, model: Any) -> None:
    """Those in slots too. They are the same objects: what changes in training stands in the items."""
    held: Any = object.__getstate__(model)
    for part in held if isinstance(held, tuple) else (held,):
        for name, value in (part or {}).items():
            object.__setattr__(made, name, value)
