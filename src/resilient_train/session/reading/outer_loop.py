"""A ``for`` loop of the user's around the one that a Session has: epochs, each with a ``session.steps()`` of its own.

Its second pass would find the Session's loop over, when all steps of the first have been trained and nothing saves them
any more: hours later. So it is refused where it begins. One around the Session itself (folds, trials) is told there.
"""

from __future__ import annotations

import ast
from types import CodeType, FrameType

from resilient_train import script_place
from resilient_train.session.reading.names import Loop, in_scope, lasts_at, loops_at
from resilient_train.session.reading.static_lookup import Texts

_LEAVES = (ast.Break, ast.Return, ast.Raise)
Made = dict[CodeType, int]
"""The user's functions that were running when a Session was made, and at which line they were."""


def made_here() -> Made:
    """Of the Session that is being made."""
    return {frame.f_code: frame.f_lineno or 0 for frame in script_place.frames()}


def outer_loop(made: Made, texts: Texts) -> str:
    """``FILE:LINE`` of the nearest ``for`` around the call that is being made, in which the Session was not ``made``.

    Empty: there is none; or there is a way out of a loop here, so that the inner one may go on where it was; or the
    text can't be read. A ``while`` may have a condition that is false behind the first pass.
    """
    return _nearest(made, texts, around_session=False)


def loop_of_sessions(made: Made, texts: Texts) -> str:
    """Likewise, the nearest ``for`` in which the Session *was* made: its second pass makes a second one."""
    return _nearest(made, texts, around_session=True)


def _nearest(made: Made, texts: Texts, *, around_session: bool) -> str:
    for frame in script_place.frames():
        loops = [each for each in loops_at(frame, texts) if was_around(each, frame, made) is around_session]
        if any(isinstance(each, _LEAVES) for loop in loops for each in in_scope(loop)):
            return ""
        around = [each for each in loops if isinstance(each, ast.For) and not _heads(each, frame.f_lineno or 0)]
        if around:
            return f"{frame.f_code.co_filename}:{around[-1].lineno}"
    return ""


def was_around(loop: Loop, frame: FrameType, made: Made) -> bool:
    """Whether the Session was made in it."""
    return frame.f_code in made and lasts_at(loop, made[frame.f_code])


def _heads(loop: ast.For, line: int) -> bool:
    """What stands in its first line is run once: ``for step in session.steps(n):``"""
    return loop.iter.lineno <= line <= (loop.iter.end_lineno or line)
