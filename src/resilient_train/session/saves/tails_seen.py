"""What this rank's tails are seen to write otherwise than its replicas' tails do.

Of a rank that is lost behind an update a replica tells what the code there writes: where both had the same in front of
it, the new process takes what the replica has behind it. That is wrong where each rank writes its own into what was
the same just then (DistributedDataParallel has made a buffer equal, or an average has); and what that rank alone writes
no replica tells. Both show in earlier tails, in what the ranks have published around them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from resilient_train.frameworks.roles import NOTHING_OF_ITS_OWN, RankState, TailsWrite
from resilient_train.session.peers import Peers

_SHARE = 0.001
"""Of all time, that looks may take: each takes states apart, some milliseconds where there are many buffers."""
_NEIGHBOURS = 2


class TailsSeen:
    """Looked at behind the tails that write for the 1st, 2nd, 3rd, 4th, 7th, 8th, 15th, ... time, behind others as
    long as there is time, and when a rank is lost.
    """

    def __init__(self, peers: Peers, rank_state: RankState, replicas: Sequence[int]) -> None:
        self._peers = peers
        self._rank_state = rank_state
        behind = sorted(replicas, key=lambda each: (each < peers.rank, each))
        self._neighbours = [each for each in behind if each != peers.rank][:_NEIGHBOURS]
        self.found = NOTHING_OF_ITS_OWN
        self._writing = 0
        """Tails of this rank's that have written."""
        self._spent_s, self._began_s = 0.0, time.monotonic()
        self._front: dict[int, bytes] = {}
        """Update -> what this rank alone had in front of the tail that leads to it, and ..."""
        self._behind: dict[int, bytes] = {}
        """... behind that. Of the last two."""

    def take_up(self, found: TailsWrite) -> None:
        """That of the process whose place this one takes."""
        self.found, self._front, self._behind = found, {}, {}

    def tail_begins(self, commits: int, own: bytes) -> None:
        """That which leads to this update."""
        self._front = {**_of(self._front, commits - 1), commits: own}

    def begins(self, commits: int, own: bytes) -> None:
        """The update begins. Of the one before all know by now what their tails have written; and until this rank comes
        to the next one, that stands where they have published it.
        """
        last = commits - 1
        if self._written(last) is not None:
            self._writing = nth = self._writing + 1
            now_s = time.monotonic()
            seldom = not nth & (nth - 1) or not nth & (nth + 1)  # not by powers of 2 alone: what of every 4th one?
            if seldom or self._spent_s < _SHARE * (now_s - self._began_s):
                self._look(last, all_begun=True)
                self._spent_s += time.monotonic() - now_s
        self._behind = {**_of(self._behind, last), commits: own}

    def at_loss(self, commits: int) -> TailsWrite:
        """A rank was lost in the tail that leads to this update, or behind it."""
        self._look(commits - 1, all_begun=True)
        self._look(commits, all_begun=False)
        return self.found

    def _written(self, commits: int) -> tuple[bytes, bytes] | None:
        front, behind = self._front.get(commits), self._behind.get(commits)
        if not self._neighbours or front is None or behind is None or front == behind:
            return None
        return front, behind

    def _look(self, commits: int, *, all_begun: bool) -> None:
        """``all_begun``: no rank is in the tail that leads to this update any more."""
        mine = self._written(commits)
        if mine is None:
            return
        others = (self._peers.around_tail(rank, commits) for rank in self._neighbours)
        known = [(front, behind) for front, behind, begun in filter(None, others) if begun or all_begun]
        seen = self._rank_state.tail_wrote(*mine, known)
        self.found = TailsWrite(*(tuple(sorted({*a, *b})) for a, b in zip(self.found, seen, strict=True)))


def _of(held: dict[int, bytes], commits: int) -> dict[int, bytes]:
    return {commits: held[commits]} if commits in held else {}
