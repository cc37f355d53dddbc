"""All objects that the garbage collector knows in this process, whoever holds them."""

from __future__ import annotations

import gc
from typing import Any


def listed(frozen: int = 0) -> list[Any]:
    """What a script has frozen (``gc.freeze()``) is not listed, so it is thawed for a moment. Not so where no more than
    ``frozen`` objects are: those were before the script, and to list a zygote's takes a fork 0.1 s.

    Ask for the type of one by ``type``: ``isinstance`` would ask the object, which may be a proxy of the user's.
    """
    if gc.get_freeze_count() <= frozen:
        return gc.get_objects()
    gc.unfreeze()
    found = gc.get_objects()
    gc.freeze()
    return found
