"""A job that has to end saves what it has: who does, and from which state. Pure, like the controller that asks.

Two ways. While every rank can be had (somebody asks the job to end), a recovery without a fault brings all to the head
of the same window, the running update applied or dropped, and each saves its share. Where a rank is gone for good, the
survivors save: each still has the state from before the update that was cut, or will have it once its tail is over. No
group is built then; no two survivors have to speak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resilient_train.protocol.messages import Joined, SaveLast
from resilient_train.protocol.standing import Phase

_NOTHING = "no end-of-life checkpoint could be written"
_AT_HEAD = (Phase.COMPUTE, Phase.READY)
"""The update has not begun: the state is what it was at the head of the window."""


class Choice(NamedTuple):
    """``savers``: for each replica group the ranks that divide its state among themselves."""

    commits: int
    savers: tuple[tuple[int, ...], ...]
    exact: bool
    """False: a saver was cut in its tail, and finishes it without the others (its collectives give its own values); or
    the script has failed there, and no other rank has the state.
    """


def choose(joined: Mapping[int, Joined], groups: Sequence[Sequence[int]]) -> Choice | None:
    """The newest state of which each group has a living holder; an exact one if there is any. None: there is none."""
    heads = {rank: each.commits for rank, each in joined.items() if each.holds and each.phase in _AT_HEAD}
    for commits in sorted(set(heads.values()), reverse=True):
        savers = tuple(_at_head(group, heads, commits) for group in groups)
        if all(savers):
            return Choice(commits, savers, exact=True)
    tails = {rank: each for rank, each in joined.items() if each.holds and each.phase == Phase.APPLIED}
    for commits in sorted({each.commits for each in tails.values()}, reverse=True):
        here = {rank: (not each.tail_failed, each.tail_done) for rank, each in tails.items() if each.commits == commits}
        savers = tuple(_at_head(group, heads, commits) or _furthest(group, here) for group in groups)
        if all(savers):
            return Choice(commits, savers, exact=False)
    return None


def why_none(joined: Mapping[int, Joined], groups: Sequence[Sequence[int]]) -> str:
    """What to tell where there is no ``Choice``: whose state is missing."""
    whole = {rank for rank, each in joined.items() if each.holds}
    missing = [list(group) for group in groups if not whole & set(group)]
    if missing:
        return f"{_NOTHING}: no living rank holds a whole state of the replica groups {missing}"
    return f"{_NOTHING}: the replica groups' survivors hold the state from before different updates"


def _at_head(group: Sequence[int], heads: Mapping[int, int], commits: int) -> tuple[int, ...]:
    return tuple(rank for rank in group if heads.get(rank) == commits)


def _furthest(group: Sequence[int], tails: Mapping[int, tuple[bool, int]]) -> tuple[int, ...]:
    """One only: what replicas do alone in a tail may differ, and a state is saved whole."""
    return tuple(sorted((rank for rank in group if rank in tails), key=tails.__getitem__, reverse=True)[:1])


class Leaving:
    """That the job ends, and with what. ``alone``: without the ranks in ``gone``."""

    def __init__(self, code: int, reason: str, *, alone: bool) -> None:
        self.code = code
        self.reason = reason
        self.alone = alone
        self.gone: set[int] = set()
        self.choice: Choice | None = None

    def copy(self) -> Leaving:
        """An independent one in the same state."""
        new = Leaving(self.code, self.reason, alone=self.alone)
        new.gone, new.choice = set(self.gone), self.choice
        return new

    def key(self) -> tuple[object, ...]:
        """Equal for two that will answer alike."""
        return self.code, self.alone, frozenset(self.gone), self.choice

    def orders(self, generation: int, choice: Choice, world_size: int) -> dict[int, SaveLast]:
        """What each rank that is left is told."""
        self.choice = choice
        savers = [rank for group in choice.savers for rank in group]
        heirs = tuple(rank for rank in range(world_size) if rank not in savers)
        orders = {rank: SaveLast(generation, choice.commits) for rank in range(world_size) if rank not in self.gone}
        for group in choice.savers:
            for part, rank in enumerate(group):
                shard = savers.index(rank)
                inherits = heirs if shard == 0 else ()
                orders[rank] = SaveLast(
                    generation, choice.commits, part, len(group), shard, len(savers), dict.fromkeys(inherits, b"")
                )
        return orders
