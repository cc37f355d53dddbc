"""Some windows are computed twice before their update: do a rank's bodies come to the same bits from the same inputs?

What is compared is what the rank gives to each collective of the window, in the order of the calls, and then what its
update would use. A device that computes wrongly now and then shows there, also where all replicas take over what it has
computed, and so agree. Which rank it was is told by the place: whatever another rank has made of a wrong value came
later.

A window counts when two of its runs have come to the same. All ranks are asked at the same updates; that a window was
computed once already stands in the Resume behind its first run, so that a process that has lost its place takes part.

Between the two, a run may be made from another rank's inputs (``neighbour_inputs.py``): what a device always computes
in the same wrong way another one does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from resilient_train.frameworks.roles import Collectives, Given, Gradients, State
from resilient_train.session.comparisons.neighbour_inputs import NeighbourInputs, Theirs
from resilient_train.session.redo.loader import Batch, Drawn

_FIRST_OF_NEIGHBOURS = 2
"""Before this update as well: whether a script lets its ranks compute from each other's inputs is told at once. Earlier
DDP has not laid out its buckets for good.
"""


class Compared(NamedTuple):
    """A run of a window, beside the earlier one that it is most like, or beside the neighbour's: the first place of
    ``of`` at which it is not what that was (-1: there is none, or no earlier run), and the digests there.

    ``calls``: a digest of which calls were made. ``unshared``: why no other rank can compute from the same.
    """

    differs_at: int
    of: int
    was: str = ""
    now: str = ""
    calls: str = ""
    unshared: str = ""


class Verification:
    """One rank's part. ``every``: so many updates; 0: nothing is computed twice. ``undo``: the update is applied where
    it is looked at, and the state shows it. ``replicas``: the ranks that hold what this one holds. ``neighbours``: None
    where each rank computes from its own inputs only.
    """

    def __init__(
        self,
        collectives: Collectives,
        gradients: Gradients,
        state: State,
        *,
        every: int,
        undo: bool,
        replicas: Sequence[int] = (),
        neighbours: NeighbourInputs | None = None,
    ) -> None:
        self._collectives, self._gradients, self._state = collectives, gradients, state
        self._every, self._undo, self._replicas, self._neighbours = every, undo, frozenset(replicas), neighbours
        self._given: Given | None = None
        """What was given to collectives so far, in a window that is computed twice."""
        self._commits = -1
        self._runs: list[list[str]] = []
        """Of that window."""
        self._theirs: Theirs | str | None = None
        """This run is made from these inputs; or should be, and why it is not."""

    def due(self, commits: int) -> bool:
        """Whether the window before that update is computed twice."""
        if not self._every:
            return False
        first = self._neighbours is not None and commits == _FIRST_OF_NEIGHBOURS
        return first or commits % self._every == self._every - 1

    def drawn(self, commits: int, place: int, drawn: Drawn) -> None:
        """The body at ``place`` of the window before that update gets a new batch."""
        if self._neighbours is not None and self.due(commits):
            self._neighbours.add(place, drawn)

    def begin(self, commits: int, distance: int = 0) -> None:
        """The window begins, or begins again, and what a redo needs is kept. ``distance``: it is made from the inputs
        of the replica so many places behind this one; 0: from its own.
        """
        if not self._every:
            return
        due = self.due(commits)
        self._given, self._theirs = Given(self._replicas) if due else None, None
        if due and commits != self._commits:
            self._commits, self._runs = commits, []
        self._collectives.note_into(self._given)
        if not due or self._neighbours is None:
            return
        if not distance:
            self._neighbours.begin()
            return
        self._theirs = self._neighbours.read(commits, distance)
        if isinstance(self._theirs, Theirs):
            self._neighbours.put_on(self._theirs)

    def batch(self, place: int) -> Batch | None:
        """What the body at ``place`` gets in place of its own: another rank's."""
        if self._neighbours is None or not isinstance(self._theirs, Theirs):
            return None
        return self._neighbours.draw(self._theirs, place)

    def end(self, *, calls: bool = False) -> Compared | None:
        """The bodies of the window are over, and their collectives have succeeded. None: it is computed once.
        ``calls``: the loop gives its bodies their arguments itself.
        """
        given, theirs = self._given, self._theirs
        if given is None:
            return None
        self._collectives.note_into(None)
        self._given = None
        which = xxhash.xxh3_64_hexdigest("\n".join(given.calls).encode())
        if isinstance(theirs, str):
            return Compared(-1, 0, calls=which, unshared=theirs)
        if theirs is not None:
            return _compared(given.digests[: given.alone], [theirs.digests], which, rooted=True)
        last = self._state.fingerprint().digest() if self._undo else self._gradients.digest()
        run = [*given.digests, last]
        found = _compared(run, self._runs, which)
        if not self._runs and self._neighbours is not None:
            found = found._replace(unshared=self._neighbours.write(self._commits, given, calls=calls))
        self._runs.append(run)
        return found

    def close(self) -> None:
        """Leaves nothing for another rank to compute from."""
        if self._neighbours is not None:
            self._neighbours.close()


def _compared(run: Sequence[str], runs: Sequence[Sequence[str]], calls: str, *, rooted: bool = False) -> Compared:
    """``rooted``: of a call in which one member gives something, another rank's place says nothing."""
    found = {_first_difference(run, before, rooted=rooted): before for before in runs}
    at = -1 if -1 in found else max(found, default=-1)
    if at < 0:
        return Compared(at, len(run), calls=calls)
    return Compared(at, len(run), "".join(found[at][at : at + 1]), "".join(run[at : at + 1]), calls)


def _first_difference(run: Sequence[str], before: Sequence[str], *, rooted: bool) -> int:
    """The index; -1 if there is none."""
    for index, (this, that) in enumerate(zip(run, before, strict=False)):
        if this != that and not (rooted and "" in (this, that)):
            return index
    return -1 if len(run) == len(before) else min(len(run), len(before)) - (not rooted)
