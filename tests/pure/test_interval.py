"""The save interval: Lambert's W, the optimum against brute force, the cost formulas against simulated jobs."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from resilient_train.errors import ConfigError
from resilient_train.state.interval import Tier, best_interval, best_steps, one_plus_w0, overhead
from resilient_train.state.nested import Nested, best_nested, nested_overhead, nested_steps

RATIOS = [10 ** (-4 + 0.05 * number) for number in range(81)] + [1.25, 1.5, 1.75, 2.0]
"""Stall over mean time between failures: from 1e-4 to 2."""


def tier(stall_s: float, mtbf_s: float = 1.0, **more: float) -> Tier:
    return Tier(stall_s=stall_s, mtbf_s=mtbf_s, **more)


# -- Lambert's W


@pytest.mark.parametrize("argument", [-0.3678, -0.35, -0.3, -0.2, -0.1, -0.01, -1e-5])
def test_w0_solves_its_equation(argument: float) -> None:
    w = one_plus_w0(-1 - math.log(-argument)) - 1
    assert w * math.exp(w) == pytest.approx(argument, rel=1e-13)


def test_w0_at_values_from_the_literature() -> None:
    for argument, expected in [(-0.1, -0.11183255915896297), (-0.2, -0.25917110181907377), (-0.3, -0.48940222718021)]:
        assert one_plus_w0(-1 - math.log(-argument)) - 1 == pytest.approx(expected, rel=1e-13)


def _sixty_digits(distance: float) -> Decimal:
    """The root of -u - ln(1 - u) = distance, by halving."""
    low, high, wanted = Decimal(0), 1 - Decimal(10) ** -55, Decimal(distance)
    for _ in range(190):
        middle = (low + high) / 2
        below = -middle - (1 - middle).ln() < wanted
        low, high = (middle, high) if below else (low, middle)
    return low


@pytest.mark.parametrize("distance", [1e-12, 1e-8, 1e-5, 1e-3, 0.00129, 0.00131, 0.01, 0.3, 0.999, 1.001, 2, 7, 30])
def test_w0_to_the_last_digits_also_near_the_branch_point(distance: float) -> None:
    with localcontext() as context:
        context.prec = 60
        exact = _sixty_digits(distance)
        assert abs(Decimal(one_plus_w0(distance)) / exact - 1) < Decimal("2e-15")


def test_w0_at_its_ends() -> None:
    assert one_plus_w0(0) == 0
    assert one_plus_w0(1e-300) == pytest.approx(math.sqrt(2e-300), rel=1e-15)
    assert one_plus_w0(1e3) == one_plus_w0(math.inf) == 1
    for outside in (-1e-300, math.nan):
        with pytest.raises(ValueError, match="distance"):
            one_plus_w0(outside)


# -- one tier


@pytest.mark.parametrize("restart", [0.0, 0.5])
def test_regret_against_brute_force(restart: float) -> None:
    """At most 1 % is promised; the optimum is exact, so the grid of the brute force is all that is seen."""
    grid = np.exp(np.linspace(math.log(1e-3), math.log(3), 20_001))
    for ratio in RATIOS:
        job = tier(ratio, restart_s=restart)
        times = np.expm1(grid + ratio) * math.exp(restart) / grid
        regret = (1 + overhead(best_interval(job), job)) / times.min() - 1
        assert -1e-6 < regret < 1e-12, f"stall/mtbf {ratio}: regret {regret}"


def test_young_is_the_limit_and_wrong_where_the_stall_is_long() -> None:
    assert best_interval(tier(1e-9)) == pytest.approx(math.sqrt(2e-9), rel=1e-4)
    job = tier(1.0)
    assert (1 + overhead(math.sqrt(2), job)) / (1 + overhead(best_interval(job), job)) == pytest.approx(1.14, abs=0.01)


def test_the_unit_does_not_matter_and_the_interval_never_exceeds_the_mtbf() -> None:
    for ratio in RATIOS:
        assert best_interval(tier(ratio * 7200, 7200)) == pytest.approx(7200 * best_interval(tier(ratio)))
        assert best_interval(tier(ratio)) < 1


def test_what_is_never_finished_costs_infinitely_much() -> None:
    assert overhead(1e4, tier(0.1)) == math.inf
    assert overhead(0.1, tier(0.1, restart_s=1e4)) == math.inf
    with pytest.raises(ValueError, match="above 0"):
        overhead(0, tier(0.1))


def test_a_flush_and_a_late_alarm_bound_the_interval_from_below() -> None:
    assert best_interval(tier(1e-4, latency_s=0.5)) == 0.5
    assert best_interval(tier(1e-4, latency_s=0.5, in_flight=5)) == 0.1
    assert best_interval(tier(1e-4, latency_s=0.5, in_flight=1000)) == best_interval(tier(1e-4)), (
        "the queue is no bound"
    )
    assert best_interval(tier(1e-4, detection_s=0.2)) == 0.2
    assert overhead(0.5, tier(1e-4, latency_s=0.5)) > overhead(0.5, tier(1e-4)), "what is lost grows with the latency"


def test_whole_steps_are_the_better_neighbour() -> None:
    for step_s in (0.003, 0.0301, 0.049, 0.33, 5.0):
        job = tier(2e-3, restart_s=0.1)
        steps = best_steps(job, step_s)
        costs = {each: overhead(each * step_s, job) for each in range(max(1, steps - 2), steps + 3)}
        assert steps >= 1
        assert min(costs.values()) == costs[steps]
    assert best_steps(tier(0.0), 0.1) == 1
    assert best_steps(tier(1e-6, latency_s=0.3), 0.1) == 3, "0.3 / 0.1 is 2.9999999999999996"
    assert best_steps(tier(1e-6, latency_s=0.31), 0.1) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stall_s", -1.0),
        ("stall_s", math.nan),
        ("restart_s", math.inf),
        ("latency_s", -0.1),
        ("detection_s", math.nan),
        ("mtbf_s", 0.0),
        ("mtbf_s", math.inf),
        ("in_flight", 0),
    ],
)
def test_numbers_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        Tier(**{"stall_s": 1.0, "mtbf_s": 1.0, name: value})
    for step_s in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="a step must take"):
            best_steps(tier(0.1), step_s)
        with pytest.raises(ConfigError, match="a step must take"):
            nested_steps(tier(0.1), tier(0.1), step_s)


# -- the formulas against jobs, failure by failure


def simulated_overhead(job: Tier, interval_s: float, failures: int, seed: int) -> float:
    """Lives between failures, drawn at random: each begins with a restart, which a failure may end, and completes the
    checkpoints whose flush ends before it does. Training goes on during a flush."""
    rng = np.random.default_rng(seed)
    lives_s = rng.exponential(job.mtbf_s, failures) - job.restart_s
    flushed_s = lives_s - job.latency_s
    saves = np.maximum(0, np.floor(flushed_s / (interval_s + job.stall_s)))
    return float((lives_s + job.restart_s).sum() / (saves.sum() * interval_s)) - 1


@pytest.mark.parametrize(
    ("job", "interval_s"),
    [
        (tier(1e-3), 0.045),
        (tier(1e-3), 0.3),
        (tier(0.05, restart_s=0.2), 0.1),
        (tier(1.0, restart_s=0.1), 0.8),
        (tier(1e-3, latency_s=0.3, in_flight=10), 0.05),
        (tier(0.01, latency_s=0.2, restart_s=0.1), 0.25),
    ],
)
def test_overhead_is_that_of_simulated_jobs(job: Tier, interval_s: float) -> None:
    expected = overhead(interval_s, job)
    for seed in range(3):
        found = simulated_overhead(job, interval_s, 200_000, seed)
        assert (1 + found) / (1 + expected) == pytest.approx(1, abs=0.012), f"seed {seed}: {found} against {expected}"


def simulated_nested(plan: Nested, memory: Tier, storage: Tier, failures: int, seed: int) -> float:
    """One job, event by event: where it stands, which checkpoints it has, and what each failure takes away."""
    rng = np.random.default_rng(seed)
    rates = np.array([1 / memory.mtbf_s, 1 / storage.mtbf_s])
    gaps = rng.exponential(1 / rates.sum(), failures)
    needs_storage = rng.random(failures) < rates[1] / rates.sum()
    total_s, stored, done = 0.0, 0, 0
    source = Tier(stall_s=0, mtbf_s=1)  # the job begins without a restart
    for gap_s, to_storage in zip(gaps.tolist(), needs_storage.tolist(), strict=True):
        total_s += gap_s
        left_s = gap_s - source.restart_s
        restarting = left_s < 0
        while left_s > 0:
            left_s -= plan.interval_s + memory.stall_s
            left_s -= storage.stall_s if (done + 1) % plan.count == 0 else 0
            if left_s >= 0:
                done += 1
                stored = done if done % plan.count == 0 else stored
        source = storage if to_storage or (restarting and source is storage) else memory
        done = stored if source is storage else done
    return total_s / (stored * plan.interval_s) - 1


NESTED = [
    (Nested(0.1, 10), tier(0.005), tier(0.05, 8.0)),
    (Nested(0.2, 5), tier(0.01, restart_s=0.05), tier(0.1, 4.0, restart_s=0.4)),
    (Nested(0.5, 1), tier(0.02), tier(0.2, 5.0, restart_s=0.1)),
]


@pytest.mark.parametrize(("plan", "memory", "storage"), NESTED)
def test_nested_overhead_is_that_of_a_simulated_job(plan: Nested, memory: Tier, storage: Tier) -> None:
    expected = nested_overhead(plan, memory, storage)
    for seed in range(2):
        found = simulated_nested(plan, memory, storage, 30_000, seed)
        assert (1 + found) / (1 + expected) == pytest.approx(1, abs=0.03), f"seed {seed}: {found} against {expected}"


def test_two_tiers_become_one_where_the_other_never_fails() -> None:
    never = 1e12
    for interval_s in (0.01, 0.2, 1.0):
        one = overhead(interval_s, tier(0.03, restart_s=0.1))
        storage_only = nested_overhead(Nested(interval_s, 1), tier(0, never), tier(0.03, restart_s=0.1))
        assert storage_only == pytest.approx(one, rel=1e-6)
        memory_only = nested_overhead(Nested(interval_s, 1), tier(0.03, restart_s=0.1), tier(0, 1e7))
        assert memory_only == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("restart_s", [0.0, 0.3])
@pytest.mark.parametrize("storage_stall_s", [0.0, 1e-2, 0.5, 5.0])
@pytest.mark.parametrize("memory_stall_s", [0.0, 1e-4, 0.05])
def test_nested_regret_against_brute_force(memory_stall_s: float, storage_stall_s: float, restart_s: float) -> None:
    memory, storage = tier(memory_stall_s, restart_s=restart_s / 10), tier(storage_stall_s, 20.0, restart_s=restart_s)
    found = nested_overhead(best_nested(memory, storage), memory, storage)
    counts = sorted({round(1.25**power) for power in range(40)})
    plans = (Nested(1e-4 * 1.2**power, count) for power in range(60) for count in counts)
    least = min(nested_overhead(plan, memory, storage) for plan in plans)
    assert (1 + found) / (1 + least) - 1 < 1e-3


def test_two_tiers_cost_less_than_storage_alone() -> None:
    """A save in memory stalls 0.05 s and does for nine failures of ten, one to storage stalls 5 s; MTBF 1 h."""
    memory, storage = tier(0.05, 3600 / 0.9, restart_s=10), tier(5, 36_000, restart_s=60)
    plan = best_nested(memory, storage)
    both = nested_overhead(plan, memory, storage)
    alone = tier(5, 3600, restart_s=60)
    assert both < 0.6 * overhead(best_interval(alone), alone)
    assert plan.interval_s == pytest.approx(math.sqrt(2 * 0.05 * 4000), rel=0.1)
    assert plan.interval_s * plan.count == pytest.approx(math.sqrt(2 * 5 * 36_000), rel=0.1)


def test_nested_steps() -> None:
    memory, storage = tier(0.05, 4000), tier(5, 36_000, latency_s=90)
    best = nested_overhead(best_nested(memory, storage), memory, storage)
    for step_s in (0.1, 3.0, 15.0, 45.0):
        often, seldom = nested_steps(memory, storage, step_s)
        assert seldom % often == 0
        assert seldom * step_s >= 90
        cost = nested_overhead(Nested(often * step_s, seldom // often), memory, storage)
        assert cost < best * 1.05 or step_s > 3
