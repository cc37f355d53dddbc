"""The variables of a function that runs, read so that it does not notice."""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType, FrameType
from typing import Any

_ASKS = ("locals", "vars")
_NOT_KEPT = frozenset(
    ("LOAD_METHOD", "LOAD_ATTR", "BINARY_SUBSCR", "CONTAINS_OP", "DICT_UPDATE", "DICT_MERGE", "GET_ITER", "POP_TOP")
)
"""Only what is in it is asked for: ``{**locals()}``, ``locals().copy()``."""


def variables(frame: FrameType) -> dict[str, Any]:
    """Its own, and those of its module.

    Python 3.11 has one dictionary of a function's, made when somebody asks and written anew each time. It holds on to
    all of them until the function returns, so it is emptied. A function that may have kept it (``config = locals()``)
    would find it otherwise: of such a one only those of its module are read.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {**frame.f_globals, **frame.f_locals}
    if may_keep_locals(frame.f_code):
        return dict(frame.f_globals)
    found = frame.f_locals
    copy = {**frame.f_globals, **found}
    found.clear()
    return copy


@functools.lru_cache(maxsize=256)
def may_keep_locals(code: CodeType) -> bool:
    """Whether its text keeps what ``locals()`` gives, or hands it on."""
    if not any(name in code.co_names for name in _ASKS):
        return False
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("PRECALL", "CACHE", "PUSH_NULL")]
    for before, asks, call, behind in zip([None, *steps], steps, steps[1:], steps[2:], strict=False):
        is_asked = asks.opname in ("LOAD_GLOBAL", "LOAD_NAME") and asks.argval in _ASKS
        if is_asked and call.opname == "CALL" and call.arg == 0:
            copied = before is not None and before.opname == "LOAD_GLOBAL" and before.argval == "dict"
            if not copied and behind.opname not in _NOT_KEPT:
                return True
    return False
