"""Two kinds of checkpoint: how often to save in memory, and how often to storage as well.

Pure, as ``interval.py``, whose words and units it uses. To the first order each tier has the optimum that it would have
alone, ``sqrt(2 stall mtbf)`` with the failures that need it; ``best_nested`` starts there and searches the exact cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from resilient_train.errors import ConfigError
from resilient_train.state.interval import Tier, best_interval, fewest_steps

_GOLDEN = (math.sqrt(5) - 1) / 2
_SHORTEST = 1e-6
"""Of the mean time between failures: no shorter interval is looked at. It would gain less than this, a millionth."""


class Nested(msgspec.Struct, frozen=True):
    """A plan: every ``interval_s`` a save in memory, every ``count``-th of them to storage as well."""

    interval_s: float
    count: float


def nested_overhead(plan: Nested, memory: Tier, storage: Tier) -> float:
    """As ``interval.overhead``: a failure of ``memory`` goes back to the newest save, one of ``storage`` to the newest
    that went to storage. The two kinds of failures are independent.

    Exact, for a count that is whole: the time to come from one storage save to the next has, by storage's failures, the
    mean ``(1/E[exp(-rate T)] - 1) / rate`` where T is that time if only memory's failures happen, a sum of independent
    cycles. During a restart from storage, any failure begins that restart anew.
    """
    storage_rate = 1 / storage.mtbf_s
    cycle_s = plan.interval_s + memory.stall_s
    log_attempts = (plan.count - 1) * _log_attempts(cycle_s, memory, storage_rate)
    log_attempts += _log_attempts(cycle_s + storage.stall_s, memory, storage_rate)
    any_rate = storage_rate + 1 / memory.mtbf_s
    try:
        restart_s = math.expm1(any_rate * storage.lost_per_failure_s) / any_rate
        spent_s = math.expm1(log_attempts) * (storage.mtbf_s + restart_s)
    except OverflowError:
        return math.inf
    return spent_s / (plan.interval_s * plan.count) - 1


def _log_attempts(cycle_s: float, memory: Tier, storage_rate: float) -> float:
    """``-log E[exp(-storage_rate T)]`` where T is the time to finish one cycle in spite of memory's failures."""
    rate = 1 / memory.mtbf_s
    both = rate + storage_rate
    failed = rate / both * -math.expm1(-both * cycle_s)
    restart = both * memory.lost_per_failure_s
    restarted = math.exp(-restart) / (1 + rate / both * math.expm1(-restart))
    return both * cycle_s + math.log1p(-failed * restarted)


def best_nested(memory: Tier, storage: Tier) -> Nested:
    """The plan with a whole ``count`` that ``nested_overhead`` is least at, of those that both tiers can keep."""
    longest_s = 4 * max(best_interval(memory), best_interval(storage), storage.stall_s)
    shortest_s = max(memory.shortest_s, _SHORTEST * min(memory.mtbf_s, storage.mtbf_s))
    longest_s = max(longest_s, shortest_s, storage.shortest_s)

    def cost(interval_s: float, count: float) -> float:
        return nested_overhead(Nested(interval_s, count), memory, storage)

    def best_count(interval_s: float) -> float:
        low = max(1.0, storage.shortest_s / interval_s)
        return _least(lambda count: cost(interval_s, count), low, max(low, longest_s / interval_s))

    def best_spacing(count: float) -> float:
        low = max(shortest_s, storage.shortest_s / count)
        return _least(lambda interval_s: cost(interval_s, count), low, max(low, longest_s))

    count = best_count(_least(lambda interval_s: cost(interval_s, best_count(interval_s)), shortest_s, longest_s))
    plans = [Nested(best_spacing(each), each) for each in (math.floor(count), math.ceil(count))]
    return min(plans, key=lambda plan: cost(plan.interval_s, plan.count))


def nested_steps(memory: Tier, storage: Tier, step_s: float) -> tuple[int, int]:
    """The best plan in whole steps of ``step_s`` seconds: between saves in memory, and, a multiple, to storage.

    Raises ConfigError for a step that can't be.
    """
    if not 0 < step_s < math.inf:
        raise ConfigError(f"a step must take a number of seconds above 0, not {step_s}")
    best = best_nested(memory, storage)
    below = max(fewest_steps(memory.shortest_s, step_s), math.floor(best.interval_s / step_s))
    plans = []
    for steps in (below, below + 1):
        spacing_s = steps * step_s
        count = max(fewest_steps(storage.shortest_s, spacing_s), math.floor(best.interval_s * best.count / spacing_s))
        plans += [(steps, steps * count), (steps, steps * (count + 1))]
    return min(plans, key=lambda plan: nested_overhead(Nested(plan[0] * step_s, plan[1] // plan[0]), memory, storage))


def _least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is least between two numbers above 0: golden section, on a scale of ratios."""
    left, right = math.log(low), math.log(high)
    while right - left > 1e-4:
        first, second = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        # Both infinite: too long, the valley lies to the left.
        if cost(math.exp(first)) > cost(math.exp(second)):
            left = first
        else:
            right = second
    return min(max(math.exp((left + right) / 2), low), high)
