"""How soon a rank that becomes slower is named, and who is named for nothing.

``python benchmarks/stragglers.py [--quick] [--recorded-steps N] [--models tiny 10m] [--json FILE]``

*Generated*: ranks compute for 50 ms, with noise of several kinds. *Recorded*: jobs of two ranks, on the machine as it
is and beside a busy loop for each core, write what the straggler watch reads; that is replayed. Both with slow-downs
put in at random steps of random ranks (each a run of its own: 200 windows before, 50 behind), and without, for false
alarms; the first model once more with 30 ms slept in each body, as where a device computes. Then what all of it costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, Table, finish, launcher, show, started, write_json
from detection import busy

from resilient_train.child_job import sigterm_unwinds
from resilient_train.protocol.stragglers import TOGETHER_NS, Slower, Stragglers

USUAL_NS = 50e6
FACTORS = (1.2, 1.4, 2.0)
BEFORE, WITHIN = 200, 50
"""Windows before a slow-down, and those in which it is to be found."""
Window = list[float]
"""How long each rank has computed, in nanoseconds."""


# -- what is generated


def normal(share: float) -> Callable[[random.Random, int, int], Iterator[Window]]:
    """Each rank's own noise, as a share of a window."""

    def windows(chance: random.Random, ranks: int, _: int) -> Iterator[Window]:
        while True:
            yield [USUAL_NS * max(0.1, chance.gauss(1, share)) for _ in range(ranks)]

    return windows


def lognormal(share: float) -> Callable[[random.Random, int, int], Iterator[Window]]:
    """The same, skewed."""

    def windows(chance: random.Random, ranks: int, _: int) -> Iterator[Window]:
        while True:
            yield [USUAL_NS * chance.lognormvariate(0, share) for _ in range(ranks)]

    return windows


def heavy(chance: random.Random, ranks: int, _: int) -> Iterator[Window]:
    """3 %, and one window in twenty of a rank is longer, with a tail whose variance is infinite."""
    while True:
        late = [chance.paretovariate(1.5) if chance.random() < 0.05 else 1.0 for _ in range(ranks)]
        yield [USUAL_NS * chance.gauss(1, 0.03) * min(each, 1000) for each in late]


def periodic(chance: random.Random, ranks: int, offset: int) -> Iterator[Window]:
    """5 %; rank 0 writes a log each ten windows (half of one more), and each rank's clock swings by 3 % in 200."""
    number = offset
    while True:
        number += 1
        swings = [1 + 0.03 * math.sin(2 * math.pi * number / 200 + rank) for rank in range(ranks)]
        logs = [0.5 if rank == 0 and number % 10 == 0 else 0.0 for rank in range(ranks)]
        yield [USUAL_NS * (chance.gauss(1, 0.05) * swing + log) for swing, log in zip(swings, logs, strict=True)]


def together(chance: random.Random, ranks: int, _: int) -> Iterator[Window]:
    """5 %; sequences of other lengths in each window, and for 300 windows in 1,000 all take 1.5 times as long."""
    number = 0
    while True:
        number += 1
        length = chance.lognormvariate(0, 0.3) * (1.5 if number % 1000 < 300 else 1.0)
        yield [USUAL_NS * length * chance.gauss(1, 0.05) for _ in range(ranks)]


def uneven(chance: random.Random, ranks: int, _: int) -> Iterator[Window]:
    """5 %; rank 0 has twice as much to do, always."""
    while True:
        yield [USUAL_NS * (2 if rank == 0 else 1) * chance.gauss(1, 0.05) for rank in range(ranks)]


KINDS: dict[str, Callable[[random.Random, int, int], Iterator[Window]]] = {
    "normal 2 %": normal(0.02),
    "normal 5 %": normal(0.05),
    "normal 10 %": normal(0.1),
    "lognormal 10 %": lognormal(0.1),
    "lognormal 15 %": lognormal(0.15),
    "heavy tails": heavy,
    "periodic": periodic,
    "together": together,
    "uneven": uneven,
}


# -- what is found


class Found(NamedTuple):
    """Of one slow-down: windows until it was named, and how far from its step; None: it was not, or another."""

    after: int | None
    since: int | None
    ratio: float | None


def slowed(windows: Iterator[Window], ranks: int, rank: int, factor: float) -> Found:
    """One run in which ``rank`` becomes slower behind ``BEFORE`` windows."""
    stragglers = Stragglers(ranks)
    for number in range(BEFORE + WITHIN):
        times = next(windows)
        if number >= BEFORE:
            times[rank] *= factor
        for verdict in stragglers.observe(number, times):  # type: ignore[arg-type] # a fraction of a nanosecond
            if isinstance(verdict, Slower) and number >= BEFORE:
                if verdict.rank != rank:
                    return Found(None, None, None)
                return Found(number - BEFORE + 1, verdict.since - BEFORE, verdict.ratio)
    return Found(None, None, None)


def alarms(windows: Iterator[Window], ranks: int, count: int) -> int:
    """How often somebody is named although nobody was slowed."""
    stragglers = Stragglers(ranks)
    verdicts = (stragglers.observe(number, next(windows)) for number in range(count))  # type: ignore[arg-type]
    return sum(isinstance(verdict, Slower) for found in verdicts for verdict in found)


def row(name: str, founds: dict[float, list[Found]], false_alarms: int, count: int) -> dict[str, Any]:
    result: dict[str, Any] = {"noise": name, "false_alarms": false_alarms, "windows": count}
    for factor, several in founds.items():
        after = sorted(each.after for each in several if each.after is not None)
        since = sorted(abs(each.since) for each in several if each.since is not None)
        result[str(factor)] = {
            "runs": len(several),
            "found": len(after),
            "after_median": after[len(after) // 2] if after else None,
            "after_max": after[-1] if after else None,
            "since_off_median": since[len(since) // 2] if since else None,
        }
    return result


def generated(runs: int, count: int, world: int) -> Iterator[dict[str, Any]]:
    for name, kind in KINDS.items():
        chance = random.Random(f"{name} {world}")
        founds = {
            factor: [
                slowed(kind(chance, world, chance.randrange(200)), world, chance.randrange(world), factor)
                for _ in range(runs)
            ]
            for factor in FACTORS
        }
        yield row(f"{name}, {world} ranks", founds, alarms(kind(chance, world, 0), world, count), count)


# -- what is recorded


def record(model: str, steps: int, slept_s: float, loops: int, folder: Path, limit_s: int) -> list[Window]:
    """The windows of a job of two ranks, beside so many busy loops."""
    folder.mkdir(parents=True)
    command = [*launcher("resilient-run", 2, folder / "run"), str(HERE / "stragglers_job.py"), model]
    with busy(loops), started([*command, str(folder), str(steps), str(slept_s)], folder / "job.log") as process:
        finish(process, folder / "job.log", limit_s)
    by_rank = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]
    times = [{commits: ns for commits, _, ns in windows if ns and commits > 5} for windows in by_rank]
    return [[times[0][commits], times[1][commits]] for commits in sorted(times[0].keys() & times[1].keys())]


def taken_together(windows: list[Window]) -> list[Window]:
    """As the detector takes them: what is counted is one of these."""
    found: list[Window] = []
    total = [0.0, 0.0]
    for times in windows:
        total = [sum(both) for both in zip(total, times, strict=True)]
        if max(total) >= TOGETHER_NS:
            found.append(total)
            total = [0.0, 0.0]
    return found


def replayed(name: str, recorded: list[Window], runs: int) -> dict[str, Any]:
    chance, windows = random.Random(name), taken_together(recorded)
    founds: dict[float, list[Found]] = {}
    if len(windows) <= BEFORE + WITHIN:
        raise SystemExit(f"{len(windows)} windows were recorded, too few: name more --recorded-steps")
    for factor in FACTORS:
        starts = [chance.randrange(len(windows) - BEFORE - WITHIN) for _ in range(runs)]
        founds[factor] = [
            slowed((list(each) for each in windows[start:]), 2, chance.randrange(2), factor) for start in starts
        ]
    return row(name, founds, alarms(iter(windows), 2, len(windows)), len(windows))


# -- what it costs


def cost(rounds: int) -> dict[str, float]:
    """Microseconds a step: in the training thread of a rank, and in the agent (for two ranks, and for eight)."""
    from resilient_train._native import Board, Page
    from resilient_train.frameworks.torch.communication.waits import waits
    from resilient_train.session.compute_clock import ComputeClock

    board = Board.create(2)
    pages = [Page(board, rank) for rank in range(2)]
    clock = ComputeClock(waits.total_ns, pages[0].add_computed)
    begun = time.perf_counter_ns()
    for number in range(rounds):
        clock.start()
        waits.begun()
        waits.until(int)
        clock.stop()
        pages[0].begin(number + 1, 0, number)
    rank_us = (time.perf_counter_ns() - begun) / rounds / 1e3
    result = {"rank_us": rank_us}
    for ranks in (2, 8):
        stragglers, chance = Stragglers(ranks), random.Random(0)
        windows = [[USUAL_NS * chance.gauss(1, 0.05) for _ in range(ranks)] for _ in range(rounds)]
        begun = time.process_time_ns()
        for number, times in enumerate(windows):
            stragglers.observe(number, times)  # type: ignore[arg-type]
        result[f"agent_us_{ranks}"] = (time.process_time_ns() - begun) / rounds / 1e3
    return result


def tables(results: list[dict[str, Any]], costs: dict[str, float]) -> list[Table]:
    rows = []
    for each in results:
        cells = []
        for factor in FACTORS:
            of = each[str(factor)]
            after = f"{of['after_median']} ({of['after_max']})" if of["found"] else "-"
            cells += [f"{100 * of['found'] / of['runs']:.1f} %", after, str(of["since_off_median"])]
        rows.append((each["noise"], *cells, f"{each['false_alarms']} / {each['windows']}"))
    columns = ["noise of a rank"]
    for factor in FACTORS:
        columns += [f"x {factor}: found in {WITHIN}", "after (max)", "off"]
    found = [Table("stragglers: windows until named, and how far off its step is told", (*columns, "false"), rows)]
    found.append(Table("cost of a step, us", tuple(costs), [tuple(f"{each:.1f}" for each in costs.values())]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="slow-downs of a cell (default 500; 20 with --quick)")
    parser.add_argument("--windows", type=int, help="windows without one (default 100,000; 5,000 with --quick)")
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--models", nargs="*", default=["tiny", "10m"])
    parser.add_argument("--recorded-steps", type=int, nargs="+", help="steps of a recorded job, for each model")
    parser.add_argument("--limit-s", type=int, default=1200, help="longest time for a job")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    runs = arguments.runs or (20 if arguments.quick else 500)
    count = arguments.windows or (5_000 if arguments.quick else 100_000)
    steps = arguments.recorded_steps or ([8_000, 600] if arguments.quick else [40_000, 2_000])
    results: list[dict[str, Any]] = []
    for world in arguments.worlds:
        for result in generated(runs, count, world):
            print(f"{result['noise']}: done", flush=True)
            results.append(result)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="rt-stragglers-") as folder, sigterm_unwinds():
        jobs = [(each, steps[min(index, len(steps) - 1)], 0.0) for index, each in enumerate(arguments.models)]
        jobs += [(each, steps[-1], 0.03) for each in arguments.models[:1]]
        for (model, many, slept_s), loops in itertools.product(jobs, (0, cores)):
            beside = f"beside {loops} busy loops" if loops else "as it is"
            name = f"recorded, {model}{' and 30 ms slept' if slept_s else ''}, {beside}"
            print(f"{name} ...", flush=True)
            windows = record(model, many, slept_s, loops, Path(folder) / name.replace(" ", "-"), arguments.limit_s)
            results.append(replayed(name, windows, runs))
    costs = cost(20_000)
    write_json(arguments.json, {"benchmark": "stragglers", "cases": results, "cost": costs})
    for table in tables(results, costs):
        show(table)


if __name__ == "__main__":
    main()
