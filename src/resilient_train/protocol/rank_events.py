"""What happens to a rank: the input of the rank machine (``rank.py``), beside the frames of ``messages.py``.

Three sources: the user's code and the hooks in it, frames of the agent, and the outcome of the effect that the rank
waits for.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class RankEvent(msgspec.Struct, frozen=True, tag=True):
    """``stopped``, where there is one: a stop newer than the rank's generation was raised by then."""


# -- the user's code


class Begin(RankEvent, frozen=True):
    """The loop begins with step ``number``, after ``commits`` updates; ``total``: see Next."""

    total: int
    number: int
    commits: int = 0


class Next(RankEvent, frozen=True):
    """The loop wants its next step; it goes to ``total`` - 1."""

    total: int
    stopped: bool = False
    pauses: bool = False
    """All are to stop before this step, or were to before an earlier one."""


class Enter(RankEvent, frozen=True):
    """The body of a step begins."""


class Exit(RankEvent, frozen=True):
    """The body of a step ended.

    ``fault``: with an error that a fault explains (``damaged``: memory of the device lost data; ``lost``: replicated
    state was in it). ``anomalous``: with one that asks for the step once more. ``error``: with another of the user's.
    ``leaves``: the process, or the loop, is on its way out (SystemExit, KeyboardInterrupt).
    """

    how: Literal["ok", "interrupted", "fault", "anomalous", "error", "leaves"] = "ok"
    text: str = ""
    damaged: bool = False
    lost: bool = False


class Over(RankEvent, frozen=True):
    """The loop is over, by its end or by a ``break``."""

    stopped: bool = False


class Raised(RankEvent, frozen=True):
    """An exception of the script's leaves the loop, and will end the process with ``code``."""

    text: str = ""
    code: int = 1


# -- hooks


class UpdateBegins(RankEvent, frozen=True):
    """Optimizer ``index`` is about to write."""

    index: int = 0


class UpdateEnds(RankEvent, frozen=True):
    """Optimizer ``index`` has written."""

    index: int = 0


class TailCut(RankEvent, frozen=True):
    """A collective of the tail failed."""

    text: str = ""
    stopped: bool = False


# -- outcomes of the effect that the rank waits for


class Ok(RankEvent, frozen=True):
    """It is done. ``value``: what it says, see the effect."""

    value: int = 1


class Failed(RankEvent, frozen=True):
    """It can't be done."""

    text: str = ""


class Anomalous(RankEvent, frozen=True):
    """Outcome of CheckCollectives: they have succeeded, and the norm or the loss of the window can't be right."""


class Doubtful(RankEvent, frozen=True):
    """The same: they have succeeded, and the agent, which was told what the window has come to, answers with a stop."""


class Stopped(RankEvent, frozen=True):
    """A newer stop was raised meanwhile, and it was given up."""


class Quieted(RankEvent, frozen=True):
    """Outcome of Quiesce: the rank can join ``generation``. ``damaged``: registered memory has lost data."""

    generation: int
    damaged: bool = False
