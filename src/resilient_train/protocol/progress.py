"""How far a rank is, finer than its standing: what tells who holds the others up.

Ranks that train together go through the same collectives. When nothing moves any more, the rank that is least far has
not come to where the others wait: it is the culprit, and the others are victims.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from resilient_train.protocol.standing import Phase

_BEYOND = 1 << 62


class Activity(enum.IntEnum):
    """What a rank says it is at."""

    TRAINING = 0
    LOADING = 1
    """It waits for the next batch."""
    SLOW = 2
    """It takes its time and has said so (``session.slow``): nobody is hung while a rank is at this."""
    FINISHED = 3
    """Its loop is over; it waits for the others."""
    LEAVING = 4
    """An error of its own has left a step or the Session: as a rule its process is about to end."""
    WAITING = 5
    """It has computed a window that is computed twice, and waits for the others to come as far."""


class Progress(NamedTuple):
    """A rank's step record, as a hang watch reads it. ``collectives``: those of all ranks that it has entered in this
    window, or in this tail.
    """

    commits: int
    phase: Phase
    collectives: int
    activity: Activity

    def place(self) -> tuple[int, bool, int, Phase]:
        """Comparable between ranks: greater is further.

        Collectives stand before the phase: a rank that left one out comes to the end of its step all the same, and the
        others wait for it, in a phase behind its own. Nobody is further than who has left the loop.
        """
        if self.activity is Activity.FINISHED:
            return self.commits, True, _BEYOND, self.phase
        if self.activity is Activity.WAITING:
            return self.commits, True, self.collectives, Phase.READY
        return self.commits, self.phase is not Phase.APPLIED, self.collectives, self.phase

    def gone_on(self, left: Progress) -> bool:
        """Whether the rank is at what needs the rank that has left its loop at ``left``.

        A body that has just begun is not: the loop may be left there as well.
        """
        begins = self.phase is Phase.COMPUTE and not self.collectives and self.commits == left.commits
        if begins or self.activity is Activity.FINISHED:
            return False
        return self.place() > left._replace(activity=Activity.TRAINING).place()

    def describe(self) -> str:
        """For people: where the rank is."""
        update = self.commits - 1 if self.phase is Phase.APPLIED else self.commits
        if self.activity is Activity.FINISHED:
            return f"has left its loop after {self.commits} updates"
        if self.activity is Activity.WAITING:
            return f"has computed update {update}, which is computed twice"
        if self.activity is Activity.LOADING:
            return f"waits for its batch of update {update}"
        place = {
            Phase.APPLIED: "after the update",
            Phase.COMPUTE: "in forward or backward",
            Phase.READY: "before the barrier",
            Phase.UPDATING: "in the optimizer",
        }[self.phase]
        return f"is {place} of update {update} and has entered {self.collectives} of its collectives"


def progress_of(record: tuple[int, int, int, int]) -> Progress:
    """The Progress of a step record as ``Board.progress`` returns it."""
    commits, phase, collectives, activity = record
    return Progress(commits, Phase(phase), collectives, Activity(activity))
