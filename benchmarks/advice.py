"""How good the advised save interval is: against brute force, against who knows the failures' rate, and in two tiers.

``python benchmarks/advice.py [--quick] [--json FILE]``: arithmetic and simulated jobs, so the machine's load does not
matter to any number but the last. The unit of time is the true mean time between failures.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Table, show, write_json

from resilient_train.state.advisor import Advisor
from resilient_train.state.failures import guess
from resilient_train.state.interval import Tier, best_interval, overhead
from resilient_train.state.nested import Nested, best_nested, nested_overhead

RATIOS = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 2.0)
"""Stall over mean time between failures."""
WRONG_BY = (0.1, 0.3, 1.0, 3.0, 10.0)
"""The mean time between failures that was supposed, over the true one."""
LIVES = 20
"""Mean times between failures that a simulated job trains for."""


def young(tier: Tier) -> float:
    """Young 1974."""
    return math.sqrt(2 * tier.stall_s * tier.mtbf_s)


def daly(tier: Tier) -> float:
    """Daly 2006, equation 37."""
    if tier.stall_s >= 2 * tier.mtbf_s:
        return tier.mtbf_s
    ratio = tier.stall_s / tier.mtbf_s / 2
    return young(tier) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - tier.stall_s


def regret(interval_s: float, tier: Tier) -> float:
    """Time that the job takes more, in percent, than with the best of 200,000 intervals; 0 if none is better."""
    grid_s = np.exp(np.linspace(math.log(1e-3), math.log(5), 200_001)) * tier.mtbf_s
    least = (np.expm1((grid_s + tier.stall_s) / tier.mtbf_s) * tier.mtbf_s / grid_s).min()
    return max(0.0, float(100 * ((1 + overhead(interval_s, tier)) / least - 1)))


def against_brute_force() -> list[dict[str, Any]]:
    """A row for each ratio."""
    rows = []
    for ratio in RATIOS:
        tier = Tier(stall_s=ratio, mtbf_s=1.0)
        found = {
            name: regret(rule(tier), tier) for name, rule in (("ours", best_interval), ("young", young), ("daly", daly))
        }
        rows.append({"ratio": ratio, "overhead": 100 * overhead(best_interval(tier), tier), **found})
    return rows


def spent(failures: list[float], stall: float, interval: Callable[[int, float], float]) -> float:
    """Wall time of a job; ``interval`` is asked with the failures so far and the time."""
    now, done, count = 0.0, 0.0, 0
    while done < LIVES:
        training = min(interval(count, now), LIVES - done)
        end = now + training + stall
        if failures[count] < end:
            now, count = failures[count], count + 1
        else:
            now, done = end, done + training
    return now


def against_the_oracle(stall: float, wrong_by: float, jobs: int, seed: int) -> dict[str, Any]:
    """Percentage points of overhead that not knowing the rate costs: mean and its standard error."""
    draw = np.random.default_rng(seed)
    known = best_interval(Tier(stall_s=stall, mtbf_s=1.0))
    expected = guess(1, device_mtbf_s=wrong_by)

    def learnt(count: int, now: float) -> float:
        return best_interval(Tier(stall_s=stall, mtbf_s=expected.seen(count, now).mtbf_s))

    points, oracle = [], []
    for _ in range(jobs):
        failures = np.cumsum(draw.exponential(1.0, 10 * LIVES)).tolist()
        knowing = spent(failures, stall, lambda _count, _now: known)
        points.append(100 * (spent(failures, stall, learnt) - knowing) / LIVES)
        oracle.append(100 * (knowing / LIVES - 1))
    error = statistics.stdev(points) / math.sqrt(jobs)
    mean = statistics.mean(points)
    return {"ratio": stall, "wrong_by": wrong_by, "points": mean, "error": error, "oracle": statistics.mean(oracle)}


def two_tiers() -> list[dict[str, Any]]:
    """Saves in memory and to storage against the best of a grid, and against storage alone."""
    rows = []
    for share, storage_stall in itertools.product((0.5, 0.9, 0.99), (1e-3, 1e-2, 0.1)):
        memory = Tier(stall_s=storage_stall / 50, mtbf_s=1 / share)
        storage = Tier(stall_s=storage_stall, mtbf_s=1 / (1 - share))
        found = nested_overhead(best_nested(memory, storage), memory, storage)
        counts = sorted({round(1.1**power) for power in range(70)})
        grid = (Nested(1e-4 * 1.05**power, count) for power in range(200) for count in counts)
        least = min(nested_overhead(plan, memory, storage) for plan in grid)
        alone = Tier(stall_s=storage_stall, mtbf_s=1.0)
        rows.append(
            {
                "share": share,
                "storage_stall": storage_stall,
                "overhead": 100 * found,
                "regret": max(0.0, 100 * ((1 + found) / (1 + least) - 1)),
                "storage_alone": 100 * overhead(best_interval(alone), alone),
            }
        )
    return rows


def cost_of_asking(rounds: int) -> dict[str, float]:
    """Microseconds of a step that is told to the Advisor, and of its answer after a save."""
    advisor = Advisor(guess(8))
    begin = time.perf_counter()
    for _ in range(rounds):
        advisor.step(0.5)
    told = time.perf_counter()
    for _ in range(rounds // 100):
        advisor.save(0.1)
        advisor.steps()
    asked = time.perf_counter()
    return {"step_us": 1e6 * (told - begin) / rounds, "steps_us": 1e6 * (asked - told) / (rounds // 100)}


def tables(result: dict[str, Any]) -> list[Table]:
    exact = [
        (f"{row['ratio']:g}", f"{row['overhead']:.3g} %", *(f"{row[name]:.2g} %" for name in ("ours", "young", "daly")))
        for row in result["brute_force"]
    ]
    learnt = [
        (
            f"{ratio:g}",
            f"{statistics.mean(row['oracle'] for row in rows):.1f} %",
            *(f"{row['points']:+.2f} ±{row['error']:.2f}" for row in rows),
        )
        for ratio, group in itertools.groupby(result["oracle"], key=lambda row: row["ratio"])
        for rows in [list(group)]
    ]
    nested = [
        (
            f"{row['share']:g}",
            f"{row['storage_stall']:g}",
            f"{row['overhead']:.3g} %",
            f"{row['storage_alone']:.3g} %",
            f"{row['regret']:.2g} %",
        )
        for row in result["two_tiers"]
    ]
    return [
        Table("time more than the best interval's", ("stall/MTBF", "overhead", "ours", "Young", "Daly"), exact),
        Table(
            f"rate unknown: points of overhead more than the oracle's, over {LIVES} MTBF; supposed MTBF / true one",
            ("stall/MTBF", "oracle", *(f"{wrong:g}" for wrong in WRONG_BY)),
            learnt,
        ),
        Table(
            "two kinds of saves; one in memory stalls a fiftieth of one to storage",
            ("share that memory does for", "storage stall/MTBF", "both", "storage alone", "regret"),
            nested,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, help="simulated for each cell (default 200; 3 with --quick)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    jobs = arguments.jobs or (3 if arguments.quick else 200)
    if jobs < 2:
        parser.error("--jobs must be 2 or more: one has no standard error")
    result: dict[str, Any] = {
        "brute_force": against_brute_force(),
        "oracle": [
            against_the_oracle(stall, wrong_by, jobs, arguments.seed)
            for stall, wrong_by in itertools.product((1e-4, 6.6e-4, 1e-2), WRONG_BY)
        ],
        "two_tiers": two_tiers(),
        "asking": cost_of_asking(10_000 if arguments.quick else 1_000_000),
        "jobs": jobs,
        "seed": arguments.seed,
    }
    for table in tables(result):
        show(table)
    asking = result["asking"]
    print(f"telling the Advisor a step: {asking['step_us']:.2f} us; asking it: {asking['steps_us']:.0f} us")
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
