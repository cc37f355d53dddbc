"""When to save next, learnt from a job that runs: ``save_every("auto")``.

Pure: it is told what happened, and has no clock. The same calls lead to the same advice; ranks that time themselves do
not make the same calls, so one of them asks and tells the others.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from resilient_train.state.failures import TRUSTED_FAILURES, FailureRate
from resilient_train.state.interval import Tier, best_steps, overhead

FIRST_STEPS = 10
"""The interval until a save has been measured: short, so that one soon is."""
WORTH = 1.05
"""The advice changes when it costs so many times what the best one does (restarts left out: no interval changes them).

That is when the best interval is 1.37 times longer or shorter: one that is wrong by a factor k costs (k + 1/k)/2 times
the least (Young). After a change it must drift as far again, so noise moves nothing, nor goes it from 1 step to 2 and
back, which a band around the interval would allow. At most a twentieth of a few percent is given away.
"""
_STEPS_KEPT = 101
_SAVES_KEPT = 15


class Advisor:
    """Gives the interval between saves, in whole steps.

    Stall, latency and step time are medians over the last 15 saves and 101 steps: a few outliers (the first save, into
    memory that was never touched; an evaluation) move nothing. The failures' rate is a posterior, see ``FailureRate``.

    ``expected``: what is supposed of the failures that need this checkpoint. ``trusted``: see ``FailureRate.seen``.
    ``failures`` and ``exposure_s`` were seen in earlier runs. ``in_flight``, ``detection_s``: see ``Tier``.
    """

    def __init__(
        self,
        expected: FailureRate,
        *,
        trusted: int = TRUSTED_FAILURES,
        failures: int = 0,
        exposure_s: float = 0.0,
        in_flight: int = 1,
        detection_s: float = 0.0,
    ) -> None:
        self._expected = expected
        self._trusted = trusted
        self._in_flight = in_flight
        self._detection_s = detection_s
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._stalls: deque[float] = deque(maxlen=_SAVES_KEPT)
        self._latencies: deque[float] = deque(maxlen=_SAVES_KEPT)
        self._failures = failures
        self._exposure_s = exposure_s
        self._advice = FIRST_STEPS

    def step(self, duration_s: float) -> None:
        """A step was trained, in that time: also one that a save slowed down."""
        self._steps.append(duration_s)
        self._exposure_s += duration_s

    def save(self, stall_s: float, latency_s: float = 0.0) -> None:
        """A save can be restored from now, ``latency_s`` after its stall.

        ``stall_s`` is the training time that it cost, see ``lost_time``. The time itself is that of the steps.
        """
        self._stalls.append(stall_s)
        self._latencies.append(latency_s)

    def earlier(self, failures: int, exposure_s: float) -> None:
        """What was seen in still earlier runs, where that is only known now."""
        self._failures += failures
        self._exposure_s += exposure_s

    @property
    def failures(self) -> int:
        """How many have been seen, in this run and before."""
        return self._failures

    @property
    def rate(self) -> FailureRate:
        """What is known of the failures now."""
        return self._expected.seen(self._failures, self._exposure_s, self._trusted)

    @property
    def step_s(self) -> float | None:
        """The usual step; None before the first."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def tier(self) -> Tier | None:
        """What was measured, to compute costs from; None before the first save."""
        if not self._stalls:
            return None
        return Tier(
            stall_s=statistics.median_low(self._stalls),
            mtbf_s=self.rate.mtbf_s,
            latency_s=statistics.median_low(self._latencies),
            in_flight=self._in_flight,
            detection_s=self._detection_s,
        )

    def steps(self) -> int:
        """How many steps to train between saves: asked after each save, it changes seldom (``WORTH``).

        What can't be kept (``Tier.shortest_s``) is left at once, worth it or not.
        """
        tier, step_s = self.tier, self.step_s
        if tier is None or not step_s:
            return self._advice
        best = best_steps(tier, step_s)
        saving = Tier(stall_s=tier.stall_s, mtbf_s=tier.mtbf_s)
        worth_it = overhead(self._advice * step_s, saving) > WORTH * overhead(best * step_s, saving)
        if worth_it or self._advice * step_s < tier.shortest_s:
            self._advice = best
        return self._advice


def lost_time(durations_s: Iterable[float], usual_s: float) -> float:
    """The stall of a save: by how much the steps that it touched were longer than usual, together; never below 0.

    ``durations_s``: of all steps from the save's begin until its flush has ended. What the copy and the flush take from
    the training is in there, also where the training did not wait.
    """
    return max(0.0, sum(duration_s - usual_s for duration_s in durations_s))


def behind(stall_s: float, taken_s: float) -> float:
    """``Tier.latency_s`` of a save that was on storage ``taken_s`` after its begin and cost ``stall_s`` of it.

    The checkpoint is of the state at the save's begin. A cycle of ``interval_s + stall_s`` begins there, too: the next
    save may not begin before this one has ended, so ``interval_s`` is at least what the stall leaves of ``taken_s``;
    and by that much a failure finds the newest checkpoint older than the newest save.
    """
    return max(0.0, taken_s - stall_s)
