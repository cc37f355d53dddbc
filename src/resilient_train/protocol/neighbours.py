"""Who computes wrongly, where ranks have computed from each other's inputs? Pure.

The ranks of a replica group stand in a ring. In a *round* of distance d each computes what the one d places behind it
has computed, its *neighbour*, and says whether it has come to something else. If any has, there is a second round, of
distance 2: so that of each rank's inputs three ranks have made something, and two of them outvote one. In a group of
two the second round repeats the first: a mishap does not come again, and of what does there is no third opinion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resilient_train.protocol.messages import Computed


class Round(NamedTuple):
    """``differ``: the ranks that have come to something else than their neighbour, and what each has told of that."""

    distance: int
    differ: Mapping[int, Computed]


class Judgement(NamedTuple):
    """``wrong``: how often each rank stood alone against two. ``unclear``: ranks among which some must be wrong, and
    nothing says which; or their script computes something of its own on each rank.
    """

    wrong: Mapping[int, int]
    unclear: tuple[int, ...]


def neighbour(group: Sequence[int], rank: int, distance: int) -> int:
    """The one so many places behind it: another one, where there is any, and up to a distance of 2 as many as there
    can be.
    """
    others = len(group) - 1
    if not others:
        return rank
    return group[(group.index(rank) + 1 + (distance - 1) % others) % len(group)]


def judge(groups: Sequence[Sequence[int]], rounds: Sequence[Round]) -> Judgement:
    """Of all groups. Without a second round all is well."""
    wrong: Counter[int] = Counter()
    unclear: list[int] = []
    if len(rounds) > 1:
        for group in groups:
            alone = _of_two(group, *rounds[:2]) if len(group) < 3 else _outvoted(group, *rounds[:2])
            # More than half of them are no devices; and there is no majority.
            if alone is None or 2 * len(alone) > len(group):
                unclear += group
            else:
                wrong += alone
    return Judgement(wrong, tuple(unclear))


def _outvoted(group: Sequence[int], first: Round, second: Round) -> Counter[int] | None:
    """For the inputs of each rank: who stands alone against two. None: all three have come to different things."""
    alone: Counter[int] = Counter()
    for owner in group:
        against = {}
        for each in (first, second):
            voter = next(rank for rank in group if neighbour(group, rank, each.distance) == owner)
            if voter in each.differ:
                against[voter] = _came_to(each.differ[voter])
        if len(against) == 2 and len(set(against.values())) == 2:
            return None
        alone.update([owner] if len(against) == 2 else against.keys())
    return alone


def _of_two(group: Sequence[int], first: Round, second: Round) -> Counter[int] | None:
    """Who has erred once. None: one of them does so each time."""
    told = [[rank for rank in group if rank in each.differ] for each in (first, second)]
    return None if set(told[0]) & set(told[1]) else Counter([*told[0], *told[1]])


def _came_to(told: Computed) -> tuple[int, str]:
    return told.differs_at, told.digests[1]
