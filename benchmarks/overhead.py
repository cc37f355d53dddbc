"""What a step costs more with a Session than without: ``python benchmarks/overhead.py [--quick] [--json FILE]``.

``--layout``: how the model is divided among ranks. ``--memory-steps N``: with a snapshot in memory of each N-th step,
which is where ranks come back from that have no replica.

For each case (ranks x model):

* *paired*: blocks of steps with and without the Session in turn, in the same processes. This is the number to quote.
* *separate*: a plain torchrun job and a resilient-run job in turn, several times. Noisier, but it also sees what the
  paired blocks share: the watchdog's and the rescue's threads, and the agent.
* *CPU*: the same for the CPU time of all threads of a rank. Waiting is not in it, nor is what other jobs do.
* *split*: where the Session's time goes, by stop watches around its calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    HERE,
    MODELS,
    USUAL_MODELS,
    BenchmarkError,
    Case,
    Table,
    finish,
    launcher,
    show,
    started,
    summary,
    write_json,
)
from timers import NOT_OURS, WAITING, WATCHED
from workload import LAYOUTS

from resilient_train.child_job import sigterm_unwinds


class Amount(NamedTuple):
    """How much is measured."""

    blocks: int
    steps: int
    split_blocks: int
    jobs: int
    warm_up: int
    limit_s: int


FULL = {"tiny": Amount(40, 200, 10, 3, 200, 600), "10m": Amount(20, 5, 6, 3, 4, 600)}
FULL["21m"] = FULL["deep"] = FULL["10m"]
QUICK = {"tiny": Amount(10, 20, 2, 0, 20, 60), "10m": Amount(10, 1, 2, 0, 2, 80)}
QUICK["21m"] = QUICK["deep"] = QUICK["10m"]


class Kind(NamedTuple):
    """What is the same in all cases."""

    layout: str
    memory_steps: int

    def describe(self) -> str:
        return f"{self.layout}, a snapshot every {self.memory_steps} steps" if self.memory_steps else self.layout


def run_job(kind: Kind, case: Case, lanes: str, amount: Amount, folder: Path) -> list[dict[str, Any]]:
    """Runs ``overhead_job.py`` to its end; returns what each rank wrote."""
    folder.mkdir(parents=True)
    log = folder / "job.log"
    runner = "torchrun" if lanes == "plain" else "resilient-run"
    flags = {
        "lanes": lanes,
        "model": case.model,
        "layout": kind.layout,
        "memory-steps": kind.memory_steps,
        "blocks": amount.blocks,
        "steps": amount.steps,
        "split-blocks": amount.split_blocks if lanes == "both" else 0,
        "warm-up": amount.warm_up,
        "out": folder,
        "limit-s": amount.limit_s,
    }
    command = [*launcher(runner, case.ranks, folder / "run"), str(HERE / "overhead_job.py")]
    more = {"RESILIENT_TAIL_LOG_BYTES": str(64 << 20)} if kind.layout == "zero" else {}  # a rank's part has to fit
    with started([*command, *(f"--{name}={value}" for name, value in flags.items())], log, more) as process:
        finish(process, log, amount.limit_s)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(case.ranks)]


def block_us(ranks: list[dict[str, Any]], lane: str, steps: int) -> list[float]:
    """Microseconds per step of each block; the ranks begin a block together, and it ends with the last of them."""
    by_block = zip(*(each["block_times"][lane] for each in ranks), strict=True)
    return [max(wall for wall, _ in times) / steps / 1e3 for times in by_block]


def block_cpu_us(ranks: list[dict[str, Any]], lane: str, steps: int) -> list[float]:
    """CPU microseconds per step and rank: all threads, the watchdog's too, and no waiting."""
    by_block = zip(*(each["block_times"][lane] for each in ranks), strict=True)
    return [statistics.mean(cpu for _, cpu in times) / steps / 1e3 for times in by_block]


def paired(ranks: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    plain, session = block_us(ranks, "plain", steps), block_us(ranks, "session", steps)
    plain_cpu, session_cpu = block_cpu_us(ranks, "plain", steps), block_cpu_us(ranks, "session", steps)
    pairs = list(zip(plain, session, strict=True))
    return {
        "plain_us": summary(plain),
        "session_us": summary(session),
        "difference_us": summary([after - before for before, after in pairs]),
        "ratio": summary([after / before for before, after in pairs]),
        "cpu_difference_us": summary([b - a for a, b in zip(plain_cpu, session_cpu, strict=True)]),
        "blocks": pairs,
    }


def parts(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The split, as the median over ranks. ``barrier_last``: what the barrier costs the rank that comes last to it."""
    splits = [each["split"] for each in ranks]

    def middle(kind: str) -> dict[str, float]:
        return {label: round(statistics.median(each[kind].get(label, 0.0) for each in splits), 2) for label in WATCHED}

    def own(us: dict[str, float]) -> float:
        return round(sum(value for label, value in us.items() if label not in (*NOT_OURS, *WAITING)), 2)

    wall, cpu = middle("us_per_step"), middle("cpu_us_per_step")
    last = [min(each) for each in zip(*(each["barrier_us"] for each in splits), strict=True)]
    return {
        "us_per_step": wall,
        "cpu_us_per_step": cpu,
        "calls_per_step": middle("calls_per_step"),
        "watch_us": round(statistics.median(each["watch_us"] for each in splits) * own(middle("calls_per_step")), 2),
        "python_calls_per_step": statistics.median(each["python_calls_per_step"] for each in splits),
        "own_us": own(wall),
        "own_cpu_us": own(cpu),
        "barrier_us": summary([value for each in splits for value in each["barrier_us"]]),
        "barrier_last_us": summary(last),
    }


def separate(kind: Kind, case: Case, amount: Amount, folder: Path) -> dict[str, Any]:
    """Jobs of their own, in turn. Each job's number is the median of its blocks."""
    found: dict[str, list[float]] = {"plain": [], "session": []}
    for job in range(amount.jobs):
        for lane in ("plain", "session") if job % 2 == 0 else ("session", "plain"):
            ranks = run_job(kind, case, lane, amount, folder / f"{lane}{job}")
            found[lane].append(statistics.median(block_us(ranks, lane, amount.steps)))
    plain, session = statistics.median(found["plain"]), statistics.median(found["session"])
    return {"job_medians_us": found, "difference_us": round(session - plain, 2), "ratio": round(session / plain, 4)}


def measure(kind: Kind, case: Case, amount: Amount, folder: Path) -> dict[str, Any]:
    ranks = run_job(kind, case, "both", amount, folder / "both")
    return {
        "layout": kind.layout,
        "memory_steps": kind.memory_steps,
        "ranks": case.ranks,
        "model": case.model,
        "parameters": ranks[0]["parameters"],
        "torch": ranks[0]["torch"],
        "steps_per_block": amount.steps,
        "paired": paired(ranks, amount.steps),
        "split": parts(ranks),
        "separate": separate(kind, case, amount, folder) if amount.jobs else None,
    }


def cost_table(kind: Kind, results: list[dict[str, Any]]) -> Table:
    columns = ("case", "plain us", "session us", "more us (p25..p75)", "ratio (p25..p75)", "CPU us", "separate jobs")
    rows = []
    for each in results:
        pair, apart = each["paired"], each["separate"]
        more, ratio = pair["difference_us"], pair["ratio"]
        rows.append((
            Case(each["ranks"], each["model"]).describe(),
            f"{pair['plain_us']['median']:.0f}",
            f"{pair['session_us']['median']:.0f}",
            f"{more['median']:.0f} ({more['p25']:.0f}..{more['p75']:.0f})",
            f"{ratio['median']:.4f} ({ratio['p25']:.4f}..{ratio['p75']:.4f})",
            f"{pair['cpu_difference_us']['median']:.0f}",
            f"{apart['difference_us']:.0f} us more ({apart['ratio']:.3f} x)" if apart else "not run",
        ))  # fmt: skip
    return Table(f"cost of a Session per step ({kind.describe()}), medians over pairs of blocks", columns, rows)


def split_table(results: list[dict[str, Any]]) -> Table:
    labels = [label for label in WATCHED if label not in (*NOT_OURS, *WAITING)]
    splits = [each["split"] for each in results]
    columns = ("us per step, CPU / wall", *(Case(each["ranks"], each["model"]).describe() for each in results))
    rows = [
        (label, *(f"{each['cpu_us_per_step'][label]:.1f} / {each['us_per_step'][label]:.1f}" for each in splits))
        for label in labels
    ]
    rows.append(("= our own work", *(f"{each['own_cpu_us']:.1f} / {each['own_us']:.1f}" for each in splits)))
    rows.append(("  of it stop watches", *(f"about {each['watch_us']:.0f}" for each in splits)))
    rows.append(("calls of Python functions", *(f"{each['python_calls_per_step']:.0f}" for each in splits)))
    for name, key in (("barrier, all ranks", "barrier_us"), ("barrier, last rank", "barrier_last_us")):
        rows.append((name, *(f"{each[key].get('median', 0):.1f}" for each in splits)))
    return Table("where it goes (own time, stop watches included)", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(USUAL_MODELS))
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp")
    parser.add_argument("--memory-steps", type=int, default=0)
    parser.add_argument("--jobs", type=int, help="pairs of separate jobs (default 3; 0 with --quick)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few steps, numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    kind, results = Kind(arguments.layout, arguments.memory_steps), []
    with tempfile.TemporaryDirectory(prefix="rt-overhead-") as folder, sigterm_unwinds():
        for case in (Case(ranks, model) for model in arguments.models for ranks in arguments.ranks):
            amount = (QUICK if arguments.quick else FULL)[case.model]
            amount = amount._replace(jobs=amount.jobs if arguments.jobs is None else arguments.jobs)
            print(f"{case.describe()} ...", flush=True)
            try:
                results.append(measure(kind, case, amount, Path(folder) / f"{case.model}-{case.ranks}"))
            except BenchmarkError as error:
                raise SystemExit(f"{case.describe()}: {error}") from None
            write_json(arguments.json, {"benchmark": "overhead", "quick": arguments.quick, "cases": results})
    show(cost_table(kind, results))
    show(split_table(results))


if __name__ == "__main__":
    main()
