"""What the simulation computes instead of a model: chains of hashes, so that bit-identity is equality of two numbers.

A link of a chain covers everything that went into it: a lost, repeated or foreign contribution changes all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence

TORN = -1
"""The state of a rank whose update is half written."""
NEUTRAL = 0
"""What stands for the input that a rank, dead by now, had not published to a collective of a tail."""


def first_model(shard: int) -> int:
    """The state of a shard before the first update."""
    return hash((1, shard))


def first_own(rank: int) -> int:
    """A rank's own state (RNG, position in the data) before the first update."""
    return hash((2, rank))


def drawn(own: int) -> int:
    """The rank's own state after one batch."""
    return hash((3, own))


def used(own: int) -> int:
    """The rank's own state after the body of a step, which has drawn random numbers."""
    return hash((7, own))


def gradient(rank: int, before: int, batch: int, own: int) -> int:
    """What a rank contributes to an update: ``before``, and what the body makes of a batch in its own state."""
    return hash((4, rank, before, batch, own))


def updated(model: int, gradients: Sequence[int]) -> int:
    """The state after an update with the contributions of a replica group, in the order of its ranks."""
    return hash((5, model, *gradients))


def logged(rank: int, commits: int, index: int) -> int:
    """What a rank contributes to collective ``index`` of a tail."""
    return hash((6, rank, commits, index)) | 1


class Chains:
    """The undisturbed run: ``model[shard][c]`` and ``own[rank][c]`` are the states from which update c starts.

    An update has so many steps as ``accumulate`` says. Those that are ``left_out`` are made without gradients.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        updates: int,
        accumulate: int = 1,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        ranks = sorted(rank for group in groups for rank in group)
        self.own = {rank: [first_own(rank)] for rank in ranks}
        self.model = [[first_model(shard)] for shard in range(len(groups))]
        for update in range(updates):
            gradients = dict.fromkeys(ranks, 0)
            for rank in ranks:
                own = self.own[rank][-1]
                for _ in range(accumulate):
                    own = drawn(own)
                    gradients[rank] = gradient(rank, gradients[rank], own, own)
                    own = used(own)
                self.own[rank].append(own)
            for shard, group in enumerate(groups):
                given = [] if update in left_out else [gradients[rank] for rank in group]
                self.model[shard].append(updated(self.model[shard][-1], given))
