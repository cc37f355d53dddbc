"""Who holds the state of each replica group, as far as ranks have said: asked before a process is killed.

A rank is *absent* from its loss until its replacement has joined: it surely has no state. It *has* the state while it
trains, when it says so in a recovery, and once it has done its part of one. In between (it has joined without a state,
and may have copied one since; or its memory is damaged, and it has not joined yet) nothing is known, and nothing may
rest on it. A rank that we have killed counts for nothing from that moment on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Holders:
    """``groups``: the replica groups; each rank is in one."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = tuple(map(tuple, groups))
        self.absent: set[int] = set()
        self._having = {rank for group in self._groups for rank in group}
        self._killed: set[int] = set()

    def lost(self, rank: int) -> None:
        """Its process is gone. A replacement that has joined may have copied state by now; a new one has none."""
        self.absent.add(rank)
        self._having.discard(rank)
        self._killed.discard(rank)

    def damaged(self, rank: int) -> None:
        """Its memory has lost data. Whether its state was in there it says when it joins."""
        self._having.discard(rank)

    def joined(self, rank: int, *, holds: bool) -> None:
        """It takes part in a recovery, and has said whether its state is usable."""
        self.absent.discard(rank)
        if holds:
            self._having.add(rank)
        else:
            self._having.discard(rank)

    def done(self, rank: int) -> None:
        """It has done its part of a recovery: it stands where the plan wants it."""
        self._having.add(rank)

    def killed(self, rank: int) -> None:
        """It is killed; its death is not seen yet."""
        self._killed.add(rank)

    def dying(self) -> bool:
        """Whether somebody is killed whose death is not seen yet."""
        return bool(self._killed)

    def gone(self) -> bool:
        """Whether nobody is left of some group who may have its state."""
        return any(self.absent.issuperset(group) for group in self._groups)

    def last(self, ranks: Collection[int]) -> set[int]:
        """Those of ``ranks`` that must not be killed together: no other surely has the state of their group."""
        found: set[int] = set()
        for group in self._groups:
            if not (self._having - self._killed).difference(ranks).intersection(group):
                found.update(set(group).intersection(ranks) - self.absent - self._killed)
        return found

    def copy(self) -> Holders:
        """An independent one in the same state."""
        new = Holders(self._groups)
        new.absent, new._having, new._killed = set(self.absent), set(self._having), set(self._killed)
        return new

    def key(self) -> tuple[object, ...]:
        """Equal for two that will answer alike."""
        return frozenset(self.absent), frozenset(self._having), frozenset(self._killed)
