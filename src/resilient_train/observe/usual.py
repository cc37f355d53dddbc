"""What a value usually is in this job, so that a spike is seen without a threshold that somebody has to choose.

The median of the last values, and how far the upper quartile is above it: neither is moved by a few spikes among them,
as mean and standard deviation are. It is the median absolute deviation (MAD) of one side, since norms are skewed: what
lies below the median says nothing about how far above it they go. Times 1.4826 it is a standard deviation where values
are normal.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

_KEPT = 64
_FEWEST = 16
"""Below this nothing is said: the first steps of a training are unlike all that follow."""
_DEVIATIONS = 10.0
_STANDARD = 1.4826
_FLOOR = 0.02
"""A deviation is at least so much of the median: where values hardly move, a thousandth more is no spike."""
_MOVED = 3
"""So many spikes in a row are a new level."""


class Spike(NamedTuple):
    """From ``limit`` on a value is one; ``median`` is what it was usually."""

    median: float
    limit: float


class Usual:
    """Of one value for each update, in their order."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_KEPT)
        self._in_row = 0

    def spike(self, value: float) -> Spike | None:
        """Whether a finite value is far above the usual ones. Falling is what a loss is there for."""
        count = len(self._values)
        if count < _FEWEST:
            return None
        ordered = sorted(self._values)
        median, quartile = ordered[count // 2], ordered[count * 3 // 4]
        limit = median + _DEVIATIONS * max(_STANDARD * (quartile - median), _FLOOR * abs(median))
        return Spike(median, limit) if value >= limit > median else None

    def add(self, value: float) -> None:
        """The update with this value is applied."""
        if not math.isfinite(value):
            return
        self._in_row = self._in_row + 1 if self.spike(value) is not None else 0
        if self._in_row == _MOVED:
            self._values.clear()
            self._in_row = 0
        self._values.append(value)
