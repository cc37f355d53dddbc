"""Which of its two snapshots a rank may overwrite: never the newest that all ranks hold.

Ranks do not always take the same snapshots: one is killed over its copy, another finds a slot pinned or the holder
gone. If each then overwrote the older of its two, the job could be left without one that all have. So a rank names in
its record of the board the updates from before which it holds complete snapshots, and keeps the newest that all name.

All come to the same one, whenever they look. A snapshot from before update c is named before the barrier of update c,
and the next one begins behind it. Who looks late may find only this changed: another rank has struck out what is not
kept, or has named the new snapshot, which the one that looks lacks. (Who has lost its memory strikes out what all
named: then there is nothing to keep.)
"""

from __future__ import annotations

from collections.abc import Iterable

from resilient_train.session.peers import Peers
from resilient_train.state.vault.slots import Control, SlotPair, SnapshotDraft

_NONE = 0
"""Before the first update there is nothing worth keeping."""
OFF = (1 << 64) - 1
"""In the place of a second snapshot: this rank takes none any more."""


class SnapshotNames:
    """What this rank names, and what it finds that all do."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._keep = _NONE

    def newest(self) -> int:
        """The newest update from before which all ranks hold a snapshot; 0 if there is none."""
        named = (set(self._peers.kept(rank)) - {OFF} for rank in range(self._peers.world_size))
        return max(set.intersection(*named), default=_NONE)

    def begin(self, pair: SlotPair) -> SnapshotDraft | None:
        """The slot for the next snapshot; None if it is pinned, see ``SlotPair.begin``."""
        self._keep = self.newest()
        draft = pair.begin(self._keep)
        if draft is not None:
            self._name(_NONE)
        return draft

    def complete(self, commits: int) -> None:
        """The snapshot that was begun is complete: to be told before the barrier of update ``commits``."""
        self._name(commits)

    def found(self, commits: int) -> None:
        """The one that is due was complete already: its writer was killed before it could name it."""
        if commits not in self._peers.kept(self._peers.rank):
            self._keep = self.newest()
            self._name(commits)

    def lacks(self, stores: Iterable[Control]) -> None:
        """A process takes a dead one's place, whose memory may have been lost with it: ``stores`` is what is left."""
        held = {snapshot.commits for pair in stores for snapshot in pair.complete()}
        first, second = (each if each in held else _NONE for each in self._peers.kept(self._peers.rank))
        self._peers.set_kept(first, second)

    def begin_at(self, commits: int, stores: Iterable[Control]) -> None:
        """The whole job begins after so many updates. Snapshots of later ones are of a history that it has left, and
        count no more.
        """
        kept = _NONE
        for pair in stores:
            for snapshot in pair.complete():
                if snapshot.commits > commits:
                    pair.discard(snapshot.sequence)
                elif snapshot.commits == commits and snapshot.world == self._peers.world_size:
                    kept = commits
        self._peers.set_kept(kept, _NONE)

    def leave_off(self) -> None:
        """This rank takes no snapshots any more. What it holds together with all others stays."""
        self._peers.set_kept(self.newest(), OFF)

    def left_off(self) -> int | None:
        """A rank that takes no snapshots any more: those of the others are good for nothing. None: there is none."""
        ranks = range(self._peers.world_size)
        return next((rank for rank in ranks if self._peers.kept(rank)[1] == OFF), None)

    def _name(self, commits: int) -> None:
        """In place of what is not kept."""
        first, second = self._peers.kept(self._peers.rank)
        if first == self._keep != _NONE:
            self._peers.set_kept(first, commits)
        else:
            self._peers.set_kept(commits, second)
