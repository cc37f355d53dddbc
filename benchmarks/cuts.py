"""From a connection that is cut to all ranks training again (HCCE: nobody dies), at random places of the steps.

``python benchmarks/cuts.py [--quick] [--json FILE]``: jobs of four ranks; in each twelve cuts, of a random rank, at a
random place of a step, from inside (``--faults``). Measured from the event ``injected`` to ``resumed``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from common import HERE, Case, Table, finish, launcher, show, started, summary, write_json

from resilient_train.child import sigterm_unwinds
from resilient_train.faults import PLACES
from resilient_train.observe.sinks import EVENTS_FILE, read_events

CUTS_A_JOB = 12
JOB = HERE.parent / "tests" / "process" / "jobs" / "train.py"
PHASES = ("COMPUTE", "READY", "UPDATING", "APPLIED", "BETWEEN")


def plan(ranks: int, rng: random.Random) -> tuple[str, int]:
    """A fault plan, and how many steps the job makes with it."""
    places = [(phase, at) for phase in PHASES for at in PLACES[phase]]
    step, clauses = 4, []
    for _ in range(CUTS_A_JOB):
        phase, at = rng.choice(places)
        clauses.append(f"hcce rank={rng.randrange(ranks)} step={step} phase={phase} at={at}")
        step += rng.randrange(3, 6)
    return "; ".join(clauses), step + 4


def run(ranks: int, rng: random.Random, limit_s: int, folder: Path) -> list[tuple[str, float]]:
    """(place, milliseconds) of each cut in one job."""
    folder.mkdir(parents=True)
    faults, steps = plan(ranks, rng)
    command = [*launcher("resilient-run", ranks, folder / "run"), "--faults", faults, str(JOB), "--steps", str(steps)]
    with started(command, folder / "job.log") as process:
        finish(process, folder / "job.log", limit_s)
    found: list[tuple[str, float]] = []
    cut = None
    for event in read_events(folder / "run" / EVENTS_FILE):
        if event.kind == "injected":
            cut = cut or event  # two that one recovery repairs count from the first
        elif event.kind == "resumed" and cut is not None:
            found.append((f"{cut.phase} {cut.detail['at']}", (event.time_ns - cut.time_ns) / 1e6))
            cut = None
    return found


def row(name: str, times: list[float]) -> tuple[str, ...]:
    return name, str(len(times)), f"{statistics.median(times):.0f}", f"{max(times):.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cuts", type=int, help="default 204; 12 with --quick")
    parser.add_argument("--limit-s", type=int, default=300, help="longest time for a job")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    wanted = arguments.cuts or (12 if arguments.quick else 204)
    found: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="rt-cuts-") as folder, sigterm_unwinds():
        for number in itertools.count():
            if len(found) >= wanted:
                break
            found += run(arguments.ranks, random.Random(number), arguments.limit_s, Path(folder) / str(number))
    places: dict[str, list[float]] = defaultdict(list)
    for place, ms in found:
        places[place].append(ms)
    times = [ms for _, ms in found]
    p99_ms = statistics.quantiles(times, n=100, method="inclusive")[98]
    rows = [
        (place, str(len(each)), f"{statistics.median(each):.0f}", f"{max(each):.0f}") for place, each in places.items()
    ]
    rows.append(("all", str(len(times)), f"{statistics.median(times):.0f}", f"{max(times):.0f}"))
    write_json(arguments.json, {"benchmark": "cuts", "ms": summary(times), "p99_ms": p99_ms, "places": places})
    title = f"cut -> all training, {Case(arguments.ranks, 'tiny').describe()}; p99 {p99_ms:.0f} ms"
    show(Table(title, ("where", "cuts", "median ms", "max ms"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
