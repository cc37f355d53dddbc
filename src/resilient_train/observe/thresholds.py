"""From the gradient norms and losses that a run has seen to thresholds for the next one: ``advise --norm``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from resilient_train.events import Event
from resilient_train.observe.fields import number_of
from resilient_train.observe.usual import Usual

EVERY = 64
"""Updates between two ``values`` events."""
_ABOVE = 2.0
"""Times the highest value that was no spike: the next run is never quite like this one."""


class Threshold(NamedTuple):
    """``limit`` is what is proposed; a step of which any rank's value is at or above it would have been run again."""

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


def values_of(events: Sequence[Event], what: str) -> Iterator[dict[int, float]]:
    """The values of one run's updates, ``what`` being ``norm`` or ``loss``, as each of its ranks has written them down.

    Of an update that was made twice, since all had gone back, the second one counts.
    """
    told = [event for event in events if event.kind == "values"]
    for rank in sorted({event.rank for event in told}):
        found = dict[int, float]()
        for event in told:
            first, values = number_of(event, "first"), event.detail.get(what)
            if event.rank == rank and first is not None and isinstance(values, list):
                rows = enumerate(values, first)
                found |= {at: float(each) for at, each in rows if isinstance(each, int | float) and math.isfinite(each)}
        yield found


def propose(runs: Iterable[Iterable[Mapping[int, float]]]) -> Threshold | None:
    """A threshold for runs like these: for each the values of its updates by rank. Of an update the largest counts, as
    each rank may have all run it again. None: they are too few, or none is above 0.
    """
    values, calm, spikes = list[float](), list[float](), 0
    for ranks in runs:
        largest, unusual = dict[int, float](), set[int]()
        for of_rank in ranks:
            usual = Usual()
            for update, value in sorted(of_rank.items()):
                if usual.spike(value) is not None:
                    unusual.add(update)
                usual.add(value)
                largest[update] = max(value, largest.get(update, value))
        values += largest.values()
        calm += (value for update, value in largest.items() if update not in unusual)
        spikes += len(unusual)
    if len(values) < EVERY or max(calm) <= 0:
        return None
    limit = _rounded_up(_ABOVE * max(calm))
    alarms = sum(value >= limit for value in values)
    return Threshold(len(values), sorted(values)[len(values) // 2], max(calm), spikes, limit, alarms)


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")
