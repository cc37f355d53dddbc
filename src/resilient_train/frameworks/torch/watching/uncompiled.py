"""Functions that torch.compile is to leave alone, with all that they call.

While a compiled function runs, Dynamo looks at each Python frame that begins in its thread, those too that torch's C++
begins: DDP's reducer calls a process group, say. It would try to compile a collective, and raises an error at the first
member of a group that it does not know. ``torch.compiler.disable`` wraps a function for that, which takes Dynamo's
import (a second) and time in each call; what Dynamo keeps of a code object takes neither.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._C._dynamo import eval_frame

_LEFT_ALONE = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
"""The frame itself, and what it calls."""


def all_uncompiled(owner: type) -> None:
    """Of the methods of a class."""
    uncompiled(*(each for each in vars(owner).values() if isinstance(each, FunctionType)))


def uncompiled(*functions: Callable[..., Any]) -> None:
    """Of functions that are hung on something of torch's: scripts may compile what calls them. Raises TypeError
    for something callable that is none.
    """
    for each in functions:
        if not isinstance(each, FunctionType):
            raise TypeError(f"{each!r} is no function")
        eval_frame.set_code_exec_strategy(each.__code__, _LEFT_ALONE)
