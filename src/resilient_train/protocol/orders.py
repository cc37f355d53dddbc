"""An operator's fault on its way into a rank: one word of the rank's record, which the rank reads once a step.

Three kinds of values: nobody listens (no Session of that process is in its loop), somebody listens, an order. The rank
turns the first into the second and an order back into the second, when the fault hits; the agent turns the second, and
nothing else, into an order. So an order that can't be carried out is refused instead of lost.
"""

from __future__ import annotations

from typing import NamedTuple

from resilient_train.faults import INJECTABLE, TARGETS

NOBODY = 0
LISTENING = 1
NUMBER_MAX = 0xFFFF
_FIRST_KIND = 2


class FaultOrder(NamedTuple):
    """``number``, from 1, tells one order of a job from the next; ``target`` is empty unless the kind is ``uce``."""

    number: int
    kind: str
    target: str = ""


def pack(order: FaultOrder) -> int:
    """The order as a word."""
    assert 0 < order.number <= NUMBER_MAX, order
    target = TARGETS.index(order.target) if order.target else 0
    return order.number << 16 | target << 8 | (INJECTABLE.index(order.kind) + _FIRST_KIND)


def unpack(word: int) -> FaultOrder | None:
    """The order of a word; None for a word that is none."""
    number, target, kind = word >> 16, word >> 8 & 0xFF, (word & 0xFF) - _FIRST_KIND
    if not (number and 0 <= kind < len(INJECTABLE) and target < len(TARGETS)):
        return None
    name = INJECTABLE[kind]
    return FaultOrder(number, name, TARGETS[target] if name == "uce" else "")
