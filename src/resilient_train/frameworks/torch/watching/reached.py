"""What can be reached: from an object by what it holds on to, and from the script's variables by name."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch

from resilient_train import script_place
from resilient_train.frame_variables import variables

_OBJECTS = 100_000
"""So many are gone through, at most."""
_NEAR, _NAMED, _WIDE = 2, 50_000, 1_000
"""So many objects lie between a variable of the script and what is named by it; so many are looked at, and so many of
what one of them holds.
"""
_NO_STATE = (ModuleType, type, FunctionType, FrameType, torch.nn.Module, torch.optim.Optimizer)
_OURS = "resilient_train"


def reached(start: Iterable[Any]) -> list[Any] | None:
    """What these hold on to, by whatever way; not through functions, Python's modules, and through models, optimizers
    and objects of ours only if they are among them: these lead to everything. None: it is too much.
    """
    found = list(islice(walk(start), _OBJECTS + 1))
    return found if len(found) <= _OBJECTS else None


def leads_to(each: Any) -> Iterable[Any] | None:
    """What it holds on to itself. None: too much, so it does not count."""
    if _leads_everywhere(type(each)):
        return None
    if issubclass(type(each), np.ndarray) and each.dtype == object:
        return [*each.flat]  # Python's collector does not look into it
    return () if issubclass(type(each), torch.Tensor) else gc.get_referents(each)


def walk(start: Iterable[Any], step: Callable[[Any], Iterable[Any] | None] = leads_to) -> Iterator[Any]:
    """As ``reached``, one after the other, the nearest first. ``step``: from an object to the next ones."""
    todo = deque[Any]()
    for each in start:
        todo += each.modules() if issubclass(type(each), torch.nn.Module) else (each,)
    roots, seen = set(map(id, todo)), set[int]()
    while todo:
        each = todo.popleft()
        if id(each) in seen:
            continue
        further = step(each)
        if further is None and id(each) not in roots:
            continue
        further = gc.get_referents(each) if further is None else further
        seen.add(id(each))
        yield each
        todo += further


def _leads_everywhere(kind: type) -> bool:
    return issubclass(kind, _NO_STATE) or is_ours(kind)


def is_ours(kind: type) -> bool:
    """Whether it is a class of this package's."""
    return str(kind.__module__).startswith(_OURS)


def named() -> Iterator[tuple[str, Any]]:
    """Objects near to a variable of the script that runs, each with a way to it as one writes it; the innermost
    function's come first.
    """
    looked_at = 0
    for frame in script_place.frames():
        todo = deque((name, each, 0) for name, each in variables(frame).items())
        while todo and looked_at < _NAMED:
            name, each, far = todo.popleft()
            looked_at += 1
            yield name, each
            if far < _NEAR:
                todo += ((f"{name}{place}", part, far + 1) for place, part in islice(_parts(each), _WIDE))


def _parts(each: Any) -> Iterator[tuple[str, Any]]:
    """Asked past what a class of the user's has made of it."""
    kind: Any = type(each)
    if issubclass(kind, list):
        yield from ((f"[{place}]", part) for place, part in enumerate(list.__iter__(each)))
    elif issubclass(kind, tuple):
        yield from ((f"[{place}]", part) for place, part in enumerate(tuple.__iter__(each)))
    elif issubclass(kind, dict):
        for key, part in list(islice(dict.items(each), _WIDE)):
            yield f"[{key!r}]" if type(key) is str or type(key) is int else "[...]", part
    elif kind is GeneratorType:
        yield from (("", part) for part in gc.get_referents(each))
    elif not issubclass(kind, (ModuleType, type, torch.Tensor)):
        yield from ((f".{name}", part) for name, part in list(islice(attributes_of(each).items(), _WIDE)))


def attributes_of(each: Any) -> dict[str, Any]:
    """Past what a class of the user's has made of it: a ``__getattr__`` may raise anything."""
    try:
        found = object.__getattribute__(each, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}
