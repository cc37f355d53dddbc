"""The variables of code that runs, read so that it does not notice."""

from __future__ import annotations

from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

from resilient_train._native import function_variables


def is_function(frame: FrameType) -> bool:
    """And no module, class or text that was given to ``exec``: their variables are in a dictionary of the user's."""
    return bool(frame.f_code.co_flags & CO_OPTIMIZED)


def variables(frame: FrameType) -> dict[str, Any]:
    """What its names hold now. ``frame.f_locals`` is not asked: the dictionary that a function gets by ``locals()`` is
    written anew then, and holds on to all of its variables until it returns.
    """
    return function_variables(frame) if is_function(frame) else {**frame.f_locals}
