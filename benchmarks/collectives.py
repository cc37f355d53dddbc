"""What it costs to stand between DDP and gloo: ``python benchmarks/collectives.py [--quick] [--json FILE]``.

One job, blocks of DDP steps in turn: on gloo itself (twice: the difference is noise), on a group in Python that hands
all on, on one that has a Python function called at the end of each collective, on one that does so with the thread's
state kept (``keep_thread_state``), and with the guard of ``communication/guarded_works.py``. No Session.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import HERE, MODELS, BenchmarkError, Table, finish, launcher, show, started, summary, write_json

from resilient_train.child_job import sigterm_unwinds

LIMIT_S = 580
AMOUNTS = {"tiny": (60, 100), "10m": (30, 5), "21m": (30, 3), "deep": (30, 3)}
"""Blocks, and steps of each."""
LABELS = {
    "gloo_again": "gloo, once more",
    "handed_on": "a group in Python, handing on",
    "called_back": "... with a callback at the end",
    "called_back_kept": "... the thread's state kept",
    "guarded": "... with the guard",
}


def run_job(ranks: int, model: str, blocks: int, steps: int) -> list[dict[str, list[tuple[int, int]]]]:
    with tempfile.TemporaryDirectory(prefix="rt-collectives-") as home, sigterm_unwinds():
        folder, log = Path(home), Path(home) / "job.log"
        command = [*launcher("torchrun", ranks, folder), str(HERE / "collectives_job.py")]
        flags = {"model": model, "blocks": blocks, "steps": steps, "out": folder, "limit-s": LIMIT_S}
        with started([*command, *(f"--{name}={value}" for name, value in flags.items())], log) as process:
            finish(process, log, LIMIT_S)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def compare(ranks: list[dict[str, list[tuple[int, int]]]], steps: int) -> dict[str, Any]:
    """Microseconds per step more than gloo in the same round: mean CPU time of the ranks, wall time of the last."""

    def us(lane: str, place: int) -> list[float]:
        combine = max if place == 0 else statistics.mean
        rounds = zip(*(each[lane] for each in ranks), strict=True)
        return [combine([times[place] for times in each]) / steps / 1e3 for each in rounds]

    found: dict[str, Any] = {"gloo": {"wall_us": summary(us("gloo", 0)), "cpu_us": summary(us("gloo", 1))}}
    for lane in LABELS:
        for place, name in enumerate(("wall_us", "cpu_us")):
            more = [after - before for before, after in zip(us("gloo", place), us(lane, place), strict=True)]
            found.setdefault(lane, {})[f"more_{name}"] = summary(more)
    return found


def table(found: dict[str, Any], title: str) -> Table:
    def told(numbers: dict[str, float]) -> str:
        return f"{numbers['median']:.0f} ({numbers['p25']:.0f} to {numbers['p75']:.0f})"

    rows = [("gloo itself: a step", told(found["gloo"]["cpu_us"]), told(found["gloo"]["wall_us"]))]
    for lane, label in LABELS.items():
        rows.append((label, told(found[lane]["more_cpu_us"]), told(found[lane]["more_wall_us"])))
    return Table(title, ("us per step, more than gloo", "CPU, median (quartiles)", "wall"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    blocks, steps = (4, 3) if given.quick else AMOUNTS[given.model]
    try:
        found = compare(run_job(given.ranks, given.model, blocks, steps), steps)
    except BenchmarkError as error:
        raise SystemExit(str(error)) from None
    write_json(given.json, {"benchmark": "collectives", "ranks": given.ranks, "model": given.model, "lanes": found})
    show(table(found, f"{given.ranks} ranks, {given.model}, {blocks} rounds of {steps} steps"))


if __name__ == "__main__":
    main()
