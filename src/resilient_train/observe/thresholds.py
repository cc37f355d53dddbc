"""From the gradient norms and losses that a run has seen to thresholds for the next one: ``advise --norm``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from resilient_train.events import Event
from resilient_train.observe.usual import Usual

EVERY = 64
"""Updates between two ``values`` events."""
_ABOVE = 2.0
"""Times the highest value that was no spike: the next run is never quite like this one."""


class Threshold(NamedTuple):
    """``limit`` is what is proposed; a step whose value is at or above it would have been run again."""

    values: int
    median: float
    highest: float
    """Of those that were no spikes."""
    spikes: int
    limit: float
    alarms: int
    """Applied steps, good ones as far as anybody knows, that are at or above ``limit``."""

    @property
    def alarms_at_most(self) -> float:
        """Per step, of a run like this one: an upper bound of the 95 % interval of a Poisson count."""
        return (self.alarms + 2 + 2 * math.sqrt(self.alarms + 1)) / self.values


def values_of(events: Sequence[Event], what: str) -> list[float]:
    """The values of the updates, ``what`` being ``norm`` or ``loss``, as rank 0 has written them down."""
    found = list[float]()
    for event in events:
        values = event.detail.get(what) if event.kind == "values" else None
        if isinstance(values, list):
            found += [float(each) for each in values if isinstance(each, int | float) and math.isfinite(each)]
    return found


def propose(values: Sequence[float]) -> Threshold | None:
    """A threshold for runs like the one with these values. None: they are too few, or none is above 0."""
    usual, calm, spikes = Usual(), list[float](), 0
    for value in values:
        if usual.spike(value) is None:
            calm.append(value)
        else:
            spikes += 1
        usual.add(value)
    if len(values) < EVERY or max(calm) <= 0:
        return None
    limit = _rounded_up(_ABOVE * max(calm))
    alarms = sum(value >= limit for value in values)
    return Threshold(len(values), sorted(values)[len(values) // 2], max(calm), spikes, limit, alarms)


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")
