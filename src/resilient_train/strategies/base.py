"""What can happen to a job, and what a strategy is: one way to answer it.

The controller makes a Fault of what it was told, and goes down the ``LADDER`` of strategies: the first that is for such
faults and does not refuse this one begins. A refusal says why, and is an event (``escalated``).
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from resilient_train.protocol.commands import Command
from resilient_train.protocol.job import EXIT_UNRECOVERABLE, Job


class Kind(enum.Enum):
    """Of a fault."""

    COLLECTIVE = 0
    """A collective failed, and nobody has died."""
    LATE = 1
    """A recovery does not come to its end; or who does not answer alone has the state."""
    MEMORY = 2
    """Memory of a rank's has lost data."""
    LOST = 3
    """A process is gone."""
    STATE_GONE = 4
    """Nobody is left who has some of the state."""
    AT_START = 5
    """A process is gone, or can't take up what was saved, before all were ready for their first step."""
    OWN = 6
    """A script has failed, or has left, by itself: no process that takes its place would do better."""
    TAIL = 7
    """A tail can't be finished: it needs what only a dead rank knew."""
    ANOMALY = 8
    """The gradient norm or the loss of a step can't be right, and its update is not applied."""
    DIFFERS = 9
    """Replicas do not hold the same bits, and all that was done since nobody knows when is in doubt."""
    LATE_ANOMALY = 10
    """The script has found out that what was done since some step is wrong."""


class Fault(NamedTuple):
    """``reason``: what the job ends with if nothing can be done. ``again``: it comes too often."""

    kind: Kind
    detail: str
    rank: int = -1
    """Whose it is; -1 where that is nobody, or not known."""
    reason: str = ""
    code: int = EXIT_UNRECOVERABLE
    again: bool = False


class Strategy(Protocol):
    """A module with these names. Pure: all that it knows of the job is in ``job``."""

    NAME: str
    """As in ``MS_ENABLE_TFT``."""
    KINDS: frozenset[Kind]
    """What it is for."""

    def refuses(self, fault: Fault, job: Job) -> str:
        """Empty: it takes it. Else the reason with which the job would end, for who comes next."""
        ...

    def begin(self, fault: Fault, job: Job) -> list[Command]:
        """What is done at once. Mostly ``job.begin``: all stop, join a recovery, and are given a plan."""
        ...
