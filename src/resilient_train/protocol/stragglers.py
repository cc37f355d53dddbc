"""Which rank has become slower than it was, and since which step. Pure: it is shown how long the ranks have computed.

A rank is compared with its own past and with its peers in the same windows. What is watched is the logarithm of its
time by the median of the others': where all become slower together (longer sequences, a busy machine) nothing changes
in it, and a rank that always computes more than the others has a level of its own there. Where that level shifts up,
the rank is named, if its own time explains it: not where the others have become faster, nor where all have become
slower and it just more so.

With two ranks either one's series is the other's, mirrored. That a rank becomes slower and not its peer faster is then
told by its own past alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import islice
from statistics import median

import msgspec

from resilient_train.protocol.level_shift import NOISE_OF_MAD, RECENT, LevelShift

_TOLD = math.log(1.1)
"""A level that has shifted by less is nobody's business."""
TOGETHER_NS = 20_000_000
"""Shorter windows are taken together until a rank has computed for so long: what lasts for some tens of milliseconds is
the machine's scheduler, and no straggler.
"""
_BEFORE = 64
"""Values in front of a shift that tell how long the rank computed before."""
_ERROR_OF_MEDIAN = 1.25
"""By that of the mean, in normal noise."""
_NS_PER_MS = 1e6


class Slower(msgspec.Struct, frozen=True):
    """A rank computes ``ratio`` times as long as before, against its peers, ``since`` that step."""

    rank: int
    since: int
    ratio: float
    compute_ms: float
    """Median of a window since then."""
    before_ms: float
    """The same of those before."""


class AsBefore(msgspec.Struct, frozen=True):
    """The rank keeps up with its peers as before, ``since`` that step; ``slower`` is what it had been."""

    rank: int
    since: int
    slower: Slower


class Pace(msgspec.Struct, frozen=True):
    """How long a rank computes in a window at present, and that by the median of its peers' in the same windows."""

    compute_ms: float
    ratio: float


class Stragglers:
    """``observe`` is shown each window that all ranks have gone through as usual. ``slower``: who is by now."""

    def __init__(self, world_size: int) -> None:
        self._series = [LevelShift() for _ in range(world_size)]
        kept = RECENT + _BEFORE
        self._steps: deque[int] = deque(maxlen=kept)
        """Of each entry of ``_logs`` the first."""
        self._logs: deque[list[float]] = deque(maxlen=kept)
        self._sums_ns = [0] * world_size
        self._windows = 0
        self._first = 0
        self.slower: dict[int, Slower] = {}

    def usual(self) -> dict[int, Pace]:
        """Of each rank; empty until enough windows are known."""
        if len(self._series) < 2 or not self._logs or not all(series.known for series in self._series):
            return {}
        return {
            rank: Pace(_ms(median([each[rank] for each in self._logs])), math.exp(series.usual()))
            for rank, series in enumerate(self._series)
        }

    def observe(self, step: int, times_ns: Sequence[int]) -> list[Slower | AsBefore]:
        """How long each rank has computed in a window (all above 0), which ended with ``step``. What is news of it."""
        if len(times_ns) < 2:
            return []
        if not self._windows:
            self._first = step
        self._windows += 1
        self._sums_ns = [total + time for total, time in zip(self._sums_ns, times_ns, strict=True)]
        if max(self._sums_ns) < TOGETHER_NS:
            return []
        logs = [math.log(total / self._windows) for total in self._sums_ns]
        self._sums_ns, self._windows = [0] * len(logs), 0
        self._steps.append(self._first)
        self._logs.append(logs)
        found: list[Slower | AsBefore] = []
        for rank, (series, value) in enumerate(zip(self._series, _against_peers(logs), strict=True)):
            shift = series.observe(value)
            if shift is not None and (verdict := self._judge(rank, shift.age, shift.by)) is not None:
                found.append(verdict)
        return found

    def _judge(self, rank: int, age: int, by: float) -> Slower | AsBefore | None:
        age = min(age, len(self._logs))
        since = median([each[rank] for each in islice(self._logs, len(self._logs) - age, None)])
        step = self._steps[-age]
        known = self.slower.get(rank)
        if by < 0:
            return self._ease(known, step, by, since) if known is not None else None
        first = len(self._logs) - age
        earlier = [each[rank] for each in islice(self._logs, max(0, first - _BEFORE), first)]
        if by < _TOLD or len(earlier) < 2:
            return None
        before = median(earlier)
        shared = since - before - by
        doubt = _doubt(earlier, before, age)
        if not -by / 2 - doubt <= shared <= by + doubt:
            return None
        ratio, before_ms = (known.ratio, known.before_ms) if known is not None else (1.0, _ms(before))
        self.slower[rank] = Slower(rank, step, ratio * math.exp(by), _ms(since), before_ms)
        return self.slower[rank]

    def _ease(self, known: Slower, step: int, by: float, since: float) -> AsBefore | None:
        """A rank that is slower has become faster: as before, or still slower by less."""
        ratio = known.ratio * math.exp(by)
        if ratio < math.exp(_TOLD):
            del self.slower[known.rank]
            return AsBefore(known.rank, step, known)
        self.slower[known.rank] = msgspec.structs.replace(known, ratio=ratio, compute_ms=_ms(since))
        return None


def _doubt(values: Sequence[float], middle: float, others: int) -> float:
    """Twice the standard error of the difference of two medians: of ``values``, and of so many others like them."""
    noise = NOISE_OF_MAD * median([abs(value - middle) for value in values])
    return 2 * _ERROR_OF_MEDIAN * noise * math.sqrt(1 / len(values) + 1 / others)


def _against_peers(logs: Sequence[float]) -> list[float]:
    """Each value less the median of the others."""
    if len(logs) == 2:
        return [logs[0] - logs[1], logs[1] - logs[0]]
    ordered = sorted(logs)
    high = (len(logs) - 1) // 2
    low = high - 1 + (len(logs) - 1) % 2
    found = []
    for value in logs:
        place = bisect_left(ordered, value)
        middle = (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
        found.append(value - middle)
    return found


def _ms(log_ns: float) -> float:
    return math.exp(log_ns) / _NS_PER_MS
