"""All objects that the garbage collector knows in this process, whoever holds them."""

from __future__ import annotations

import gc
import os
from typing import Any

_bases_of = vars(type)["__mro__"].__get__
"""Of a class, whatever a metaclass of the user's has made of it; it may not want to be a key of a dictionary either."""
_mark: list[list[object]] = [[]]
"""In it an object as old as this process, which the collector lists until somebody freezes all that there is."""


def _in_fork() -> None:
    _mark[0] = []  # the zygote has frozen its own


os.register_at_fork(after_in_child=_in_fork)


def listed() -> list[Any]:
    """What a script has frozen (``gc.freeze()``) is not listed, so it is thawed for a moment. Not so what a zygote has:
    that was before the script, and to list it takes a fork 0.1 s.

    Whether the script has, the mark tells. To ask how many are frozen (``gc.get_freeze_count()``) takes a fork 30 ms:
    they are counted.
    """
    found = gc.get_objects()
    if any(each is _mark[0] for each in found):
        return found
    gc.unfreeze()
    found = gc.get_objects()
    gc.freeze()
    return found


def instances_of(*kinds: type) -> list[Any]:
    """Those that are listed. No object is asked: one may be a proxy of the user's, which answers ``isinstance``."""
    found, known = list[Any](), dict[int, bool]()
    for each in listed():
        its = type(each)
        if id(its) not in known:
            known[id(its)] = any(base is kind for base in _bases_of(its) for kind in kinds)
        if known[id(its)]:
            found.append(each)
    return found
