"""How often to save: the interval that costs least when failures come at random, and what any other one costs.

Pure: numbers in, numbers out. Times are in seconds of wall clock. Failures are a Poisson process of rate ``1 / mtbf_s``
that goes on during saves and restarts. A cycle is ``interval_s`` of training and one save.

The cost is the complete model of Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006). The optimum, which Daly approximates (eq. 37), is where the derivative is
0: in closed form ``mtbf (1 + W0(-exp(-stall / mtbf - 1)))`` with Lambert's W. Young's ``sqrt(2 stall mtbf)`` is its
limit for a short stall; where the stall is as long as the mean time between failures, it takes 14 % more time.
"""

from __future__ import annotations

import math

import msgspec

from resilient_train.errors import ConfigError

_NEAR_BRANCH = 0.05
"""Below it, ``u + log(1 - u)`` is summed as a series: the difference would lose its leading digits."""


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of checkpoint, and the failures that need it. Raises ConfigError for a number that can't be."""

    stall_s: float
    """Training time that one save costs: throughput lost, not only the wait. A copy that runs behind the training and
    slows it down by 1 % for a minute stalls it for 0.6 s."""
    mtbf_s: float
    """Mean time between failures that need this checkpoint. Those that a replica repairs need none."""
    restart_s: float = 0.0
    """From such a failure until training goes on from the checkpoint, without the work that is done again."""
    latency_s: float = 0.0
    """From the end of a save's stall until the checkpoint can be restored from: the flush behind the training. Of what
    was measured from a save's begin on, see ``advisor.behind``."""
    in_flight: int = 1
    """How many saves may be on their way at once."""
    detection_s: float = 0.0
    """From a fault until it is noticed. Checkpoints that were written in between are of no use."""

    def __post_init__(self) -> None:
        for name in ("stall_s", "restart_s", "latency_s", "detection_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number of seconds from 0, not {getattr(self, name)}")
        if not 0 < self.mtbf_s < math.inf:
            raise ConfigError(f"mtbf_s must be a number of seconds above 0, not {self.mtbf_s}")
        if self.in_flight < 1:
            raise ConfigError(f"in_flight must be 1 or more, not {self.in_flight}")

    @property
    def carried_s(self) -> float:
        """The shortest interval that storage can carry: of ``in_flight`` saves, the oldest must have ended when the
        next begins.
        """
        return self.latency_s / self.in_flight

    @property
    def shortest_s(self) -> float:
        """The shortest interval that can be kept: what storage can carry, and, where detection is slow, long enough
        for no more than one checkpoint, the newest, to be younger than a fault when that is noticed. (So two must be
        kept.)
        """
        return max(self.carried_s, self.detection_s)

    @property
    def lost_per_failure_s(self) -> float:
        """What a failure costs beside the work since the checkpoint that is restored.

        That a checkpoint is of use only ``latency_s`` after its save makes every failure lose that much more, and
        changes nothing else (the number of checkpoints that a life of random length completes is that of a life
        shorter by ``latency_s``); so with ``detection_s``.
        """
        return self.restart_s + self.latency_s + self.detection_s


def one_plus_w0(distance: float) -> float:
    """``1 + W0(-exp(-1 - distance))``, from 0 to 1, for a distance from 0 to infinity.

    The argument is written by its distance from the branch point -1/e, where W0 is not smooth and where a double can't
    tell -1/e from its neighbours: the result's relative error stays at some 1e-15 down to the smallest distance. It is
    the root of ``-u - log(1 - u) = distance``.
    """
    if not distance >= 0:
        raise ValueError(f"the distance from the branch point must be from 0, not {distance}")
    if distance == 0:
        return 0.0
    if distance > 1:
        # By v = 1 - u = exp(v - 1 - distance), which is below 0.16: each step of Newton's method doubles the digits.
        v = math.exp(-1 - distance)
        for _ in range(5):
            image = math.exp(v - 1 - distance)
            v -= (v - image) / (1 - image)
        return 1 - v
    # From above, where Newton's method comes down to the root without overshooting: the bound has the same series with
    # every other term left out.
    u = math.sqrt(-math.expm1(-2 * distance))
    for _ in range(20):
        step = (_minus_u_minus_log(u) - distance) * (1 - u) / u
        u -= step
        if abs(step) <= 1e-16 * u:
            break
    return u


def _minus_u_minus_log(u: float) -> float:
    """``-u - log(1 - u) = u**2/2 + u**3/3 + ...``."""
    if u > _NEAR_BRANCH:
        return -u - math.log1p(-u)
    total, power, order = 0.0, u * u, 2
    while (term := power / order) > 1e-17 * total:
        total += term
        power *= u
        order += 1
    return total


def overhead(interval_s: float, tier: Tier) -> float:
    """Time that saves and failures cost, as a fraction of the training time; infinite where nothing is ever finished.

    Exact for the model: ``mtbf exp((restart + latency + detection) / mtbf) (exp((interval + stall) / mtbf) - 1) /
    interval - 1``. For short times ``stall / interval + (interval / 2 + restart) / mtbf``.
    """
    if not interval_s > 0:
        raise ValueError(f"an interval must be above 0, not {interval_s}")
    mtbf_s = tier.mtbf_s
    try:
        attempts = math.expm1((interval_s + tier.stall_s) / mtbf_s) * mtbf_s / interval_s
        return attempts * math.exp(tier.lost_per_failure_s / mtbf_s) - 1
    except OverflowError:
        return math.inf


def best_interval(tier: Tier) -> float:
    """The interval, in seconds, that ``overhead`` is least at, of those that can be kept; 0 if a save costs nothing."""
    return max(tier.mtbf_s * one_plus_w0(tier.stall_s / tier.mtbf_s), tier.shortest_s)


def best_steps(tier: Tier, step_s: float) -> int:
    """The best interval in whole steps of ``step_s`` seconds, at least 1: the neighbour that costs less.

    Never below ``tier.shortest_s``. Raises ConfigError for a step that can't be.
    """
    if not 0 < step_s < math.inf:
        raise ConfigError(f"a step must take a number of seconds above 0, not {step_s}")
    below = max(fewest_steps(tier.shortest_s, step_s), math.floor(best_interval(tier) / step_s))
    return min(below, below + 1, key=lambda steps: overhead(steps * step_s, tier))


def fewest_steps(time_s: float, step_s: float) -> int:
    """How many steps, at least 1, take that time. Three of 0.1 s, 0.30000000000000004 in doubles, do for 0.3 s."""
    return max(1, math.ceil(time_s / step_s * (1 - 1e-12)))
