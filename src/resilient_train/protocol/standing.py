"""How far a rank has come: the pair (commits, phase), packed so that "further" is "greater".

``commits`` counts the optimizer updates that this rank has applied. The phases of one update, in their order::

    APPLIED(c)   update c-1 is applied; the rest of the loop's body (the tail) still runs
    COMPUTE(c)   forward and backward of update c
    READY(c)     gradients of update c are fully reduced and intact; the rank's own state is published
    UPDATING(c)  every rank was READY(c); the optimizer writes

``APPLIED(s)`` of the design is ``APPLIED(c+1)`` here: the count has grown by the time the update is applied.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Phase(enum.IntEnum):
    """Phases in the order in which a rank goes through them."""

    APPLIED = 0
    COMPUTE = 1
    READY = 2
    UPDATING = 3


APPLIED, COMPUTE, READY, UPDATING = map(int, Phase)
"""The phases for native calls, which take three times as long to read a member of an enumeration as a number."""


class Standing(NamedTuple):
    """Tuples compare from the left, so ``a > b`` says that ``a`` is further."""

    commits: int
    phase: Phase


def standing_of(pair: tuple[int, int]) -> Standing:
    """The Standing of a (commits, phase) pair as the step record holds it."""
    return Standing(pair[0], Phase(pair[1]))
