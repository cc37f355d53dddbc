"""Finds where the level of a noisy series has changed for good. Pure: it is shown one value after the other.

Two cumulative sums, one for each direction, add up by how much values lie beyond half of the least shift that counts.
Noise takes them back to 0 again and again; behind a shift one of them climbs for as long as the new level lasts. What
it must climb to depends on the noise of the series' own past: the false alarms of such a sum fall exponentially with
``limit * allowance / variance``.

Single values far out (a line that is logged, a collection of garbage) count as if they were less far out. The variance
is that of means of neighbouring values too, for noise that lasts makes longer excursions than noise that doesn't.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

LEAST = math.log(1.2)
"""The least shift that is to be found, where the series are logarithms."""
_ALLOWANCE = LEAST / 2
LEARN_MIN = 64
"""Values after which a level is known."""
_LEARN_MAX = 512
RECENT = 64
"""Values that are not yet part of what is usual: a shift is found before it is taken for that."""
_LASTS = 20
"""What is over after fewer values is no shift."""
_NEWEST = 5
_LIMIT_MIN = 1.0
_LIMIT_OF_VARIANCE = 12.0
"""Natural logarithm of about how many values pass between two false alarms."""
_CLIP_MIN = 1.5 * LEAST
_CLIP_OF_NOISE = 3.0
_BLOCK = 8
NOISE_OF_MAD = 1.4826
"""Standard deviation of normal noise by its median absolute deviation."""


class Shift(NamedTuple):
    """The level has changed ``by`` so much; ``age`` values, with the newest, lie behind that."""

    age: int
    by: float


class LevelShift:
    """One series. ``observe`` is given its values."""

    __slots__ = ("_clip", "_down", "_falling", "_level", "_limit", "_recent", "_rising", "_up", "_usual", "_wait")

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_LEARN_MAX)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._level = self._clip = self._limit = 0.0
        self._up = self._down = 0.0
        self._rising = self._falling = 0
        """Values since the sum was 0."""
        self._wait = LEARN_MIN
        """So many more values become usual before it is learnt from them."""

    @property
    def known(self) -> bool:
        """Whether a shift could be found by now."""
        return self._limit > 0

    def usual(self) -> float:
        """The median of what is usual; 0.0 where nothing is known yet."""
        return median(self._usual) if self._usual else 0.0

    def observe(self, value: float) -> Shift | None:
        """One more value. A shift is returned once, and the new level is the usual one from then on."""
        if not self._limit:
            self._take_for_usual(value)
            return None
        recent = self._recent
        if len(recent) == RECENT:
            self._take_for_usual(recent.popleft())
        recent.append(value)
        beyond = value - self._level
        if beyond > self._clip:
            beyond = self._clip
        elif beyond < -self._clip:
            beyond = -self._clip
        shift: Shift | None = None
        up, down = self._up + beyond - _ALLOWANCE, self._down - beyond - _ALLOWANCE
        if up > 0.0:
            self._rising += 1
            if up >= self._limit:
                up = self._limit
                if self._rising >= _LASTS:
                    shift = self._find()
        else:
            up = 0.0
            self._rising = 0
        if down > 0.0:
            self._falling += 1
            if down >= self._limit:
                down = self._limit
                if self._falling >= _LASTS:
                    shift = shift or self._find()
        else:
            down = 0.0
            self._falling = 0
        if shift is None:
            self._up, self._down = up, down
        return shift

    def _find(self) -> Shift | None:
        """Where the level has changed most likely; None if that is too near to tell, or it is still changing."""
        values = list(self._recent)
        usual = self.usual()
        width = self._clip + abs(median(values[-_LASTS:]) - usual)
        total = best = 0.0
        age = 0
        for count, value in enumerate(reversed(values), 1):
            total += min(max(value - usual, -width), width)
            if total * total > best * count:
                best, age = total * total / count, count
        since = values[-age:]
        level = median(since)
        if age < _LASTS or abs(median(values[-_NEWEST:]) - level) > self._clip:
            return None
        self._begin_anew(since)
        return Shift(age, level - usual)

    def _begin_anew(self, since: Sequence[float]) -> None:
        self._usual.clear()
        self._recent.clear()
        self._up = self._down = 0.0
        self._rising = self._falling = 0
        self._limit, self._wait = 0.0, LEARN_MIN
        for value in since:
            self._take_for_usual(value)

    def _take_for_usual(self, value: float) -> None:
        self._usual.append(value)
        self._wait -= 1
        if self._wait <= 0:
            self._wait = len(self._usual) // 4
            self._learn()

    def _learn(self) -> None:
        values = list(self._usual)
        middle = median(values)
        noise = NOISE_OF_MAD * median([abs(value - middle) for value in values])
        self._clip = max(_CLIP_MIN, _CLIP_OF_NOISE * noise)
        low, high = middle - self._clip, middle + self._clip
        clipped = [min(max(value, low), high) for value in values]
        self._level = sum(clipped) / len(clipped)
        means = [sum(clipped[start : start + _BLOCK]) / _BLOCK for start in range(0, len(clipped) - _BLOCK + 1, _BLOCK)]
        lasting = _BLOCK * _variance(means) * (1 + 2 / len(means))  # of few means it is not known well
        self._limit = max(_LIMIT_MIN, _LIMIT_OF_VARIANCE * max(_variance(clipped), lasting) / (2 * _ALLOWANCE))


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
