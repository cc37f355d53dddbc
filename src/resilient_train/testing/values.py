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


def gradient(rank: int, owns: Sequence[int]) -> int:
    """What a rank contributes to an update; ``owns`` are its states after each batch of the window."""
    return hash((4, rank, *owns))


def updated(model: int, gradients: Sequence[int]) -> int:
    """The state after an update with the contributions of a replica group, in the order of its ranks."""
    return hash((5, model, *gradients))


def logged(rank: int, commits: int, index: int) -> int:
    """What a rank contributes to collective ``index`` of a tail."""
    return hash((6, rank, commits, index)) | 1


class Chains:
    """The undisturbed run: ``model[shard][c]`` and ``own[rank][c]`` are the states from which update c starts."""

    def __init__(self, groups: Sequence[Sequence[int]], updates: int, accumulate: int = 1) -> None:
        ranks = sorted(rank for group in groups for rank in group)
        self.own = {rank: [first_own(rank)] for rank in ranks}
        self.model = [[first_model(shard)] for shard in range(len(groups))]
        for _ in range(updates):
            owns = {rank: _batches(self.own[rank][-1], accumulate) for rank in ranks}
            for shard, group in enumerate(groups):
                gradients = [gradient(rank, owns[rank]) for rank in group]
                self.model[shard].append(updated(self.model[shard][-1], gradients))
            for rank in ranks:
                self.own[rank].append(owns[rank][-1])


def _batches(own: int, count: int) -> list[int]:
    found = []
    for _ in range(count):
        own = drawn(own)
        found.append(own)
    return found
