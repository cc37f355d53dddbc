"""Some windows are computed twice before their update: do a rank's bodies come to the same bits from the same inputs?

What is compared is what the rank gives to each collective of the window, in the order of the calls, and then what its
update would use. A device that computes wrongly now and then shows there, also where all replicas take over what it has
computed, and so agree. Which rank it was is told by the place: whatever another rank has made of a wrong value came
later.

A window counts when two of its runs have come to the same. All ranks are asked at the same updates; that a window was
computed once already stands in the Resume behind its first run, so that a process that has lost its place takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resilient_train.frameworks.roles import Collectives, Gradients, State


class Compared(NamedTuple):
    """A run of a window, beside the earlier one that it is most like: the first place of ``of`` at which it is not what
    that was (-1: there is none, or no earlier run), and the digests there.
    """

    differs_at: int
    of: int
    was: str = ""
    now: str = ""


class Verification:
    """One rank's part. ``every``: so many updates; 0: nothing is computed twice. ``undo``: the update is applied where
    it is looked at, and the state shows it.
    """

    def __init__(self, collectives: Collectives, gradients: Gradients, state: State, *, every: int, undo: bool) -> None:
        self._collectives, self._gradients, self._state = collectives, gradients, state
        self._every, self._undo = every, undo
        self._given: list[str] | None = None
        """The digests of what was given to collectives so far, in a window that is computed twice."""
        self._commits = -1
        self._runs: list[list[str]] = []
        """Of that window."""

    def due(self, commits: int) -> bool:
        """Whether the window before that update is computed twice."""
        return bool(self._every) and commits % self._every == self._every - 1

    def begin(self, commits: int) -> None:
        """The window begins, or begins again."""
        if not self._every:
            return
        due = self.due(commits)
        self._given = [] if due else None
        if due and commits != self._commits:
            self._commits, self._runs = commits, []
        self._collectives.digest_into(self._given)

    def end(self) -> Compared | None:
        """The bodies of the window are over, and their collectives have succeeded. None: it is computed once."""
        if self._given is None:
            return None
        self._collectives.digest_into(None)
        last = self._state.fingerprint().digest() if self._undo else self._gradients.digest()
        run, self._given = [*self._given, last], None
        found = {_first_difference(run, before): before for before in self._runs}
        self._runs.append(run)
        at = -1 if -1 in found else max(found, default=-1)
        if at < 0:
            return Compared(at, len(run))
        return Compared(at, len(run), "".join(found[at][at : at + 1]), run[at])


def _first_difference(run: Sequence[str], before: Sequence[str]) -> int:
    """The index; -1 if there is none."""
    for index, (this, that) in enumerate(zip(run, before, strict=False)):
        if this != that:
            return index
    return -1 if len(run) == len(before) else min(len(run), len(before)) - 1
