"""From a fault that costs no process to all ranks training again, at random places of the demonstration's steps.

``python benchmarks/cuts.py [--quick] [--json FILE]``: jobs of four ranks; in each twelve faults, of a random rank, at a
random place of a step, from inside (``--faults``): its connections are cut (HCCE), or one of its operations fails and
takes an activation with it (an exception in one rank, while the others wait in a collective). Measured from the event
``injected`` to ``resumed``.
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

from common import Table, finish, launcher, show, started, summary, write_json

from resilient_train.child_job import sigterm_unwinds
from resilient_train.faults import PLACES
from resilient_train.observe.sinks import EVENTS_FILE, read_events

FAULTS_A_JOB = 12
JOB = ("-m", "resilient_train.demo.job")
PHASES = ("COMPUTE", "READY", "UPDATING", "APPLIED", "BETWEEN")
CUTS = [("hcce", phase, at) for phase in PHASES for at in PLACES[phase]]
EXCEPTIONS = [("uce", "COMPUTE", at) for at in ("forward", "backward")]


def plan(ranks: int, rng: random.Random) -> tuple[str, int]:
    """A fault plan, and how many steps the job makes with it."""
    step, clauses = 4, []
    for _ in range(FAULTS_A_JOB):
        kind, phase, at = rng.choice(rng.choice((CUTS, EXCEPTIONS)))
        target = " target=activation" * (kind == "uce")
        clauses.append(f"{kind} rank={rng.randrange(ranks)} step={step} phase={phase} at={at}{target}")
        step += rng.randrange(3, 6)
    return "; ".join(clauses), step + 4


def run(ranks: int, rng: random.Random, limit_s: int, folder: Path) -> list[tuple[str, float]]:
    """(kind and place, milliseconds) of each fault in one job."""
    folder.mkdir(parents=True)
    faults, steps = plan(ranks, rng)
    command = [*launcher("resilient-run", ranks, folder / "run"), "--faults", faults, *JOB, "--steps", str(steps)]
    with started(command, folder / "job.log") as process:
        finish(process, folder / "job.log", limit_s)
    found: list[tuple[str, float]] = []
    fault = None
    for event in read_events(folder / "run" / EVENTS_FILE):
        if event.kind == "injected":
            fault = fault or event  # two that one recovery repairs count from the first
        elif event.kind == "resumed" and fault is not None:
            detail = fault.detail
            found.append((f"{detail['kind']} {fault.phase} {detail['at']}", (event.time_ns - fault.time_ns) / 1e6))
            fault = None
    return found


def row(name: str, times: list[float]) -> tuple[str, ...]:
    p99 = f"{_p99_ms(times):.0f}" if len(times) >= 100 else ""
    return name, str(len(times)), f"{statistics.median(times):.0f}", p99, f"{max(times):.0f}"


def _p99_ms(times: list[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--faults", type=int, help="default 400; 12 with --quick")
    parser.add_argument("--limit-s", type=int, default=300, help="longest time for a job")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    wanted = arguments.faults or (12 if arguments.quick else 400)
    found: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="rt-cuts-") as folder, sigterm_unwinds():
        for number in itertools.count():
            if len(found) >= wanted:
                break
            found += run(arguments.ranks, random.Random(number), arguments.limit_s, Path(folder) / str(number))
    by_place: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for place, ms in found:
        by_place[place].append(ms)
        by_kind[f"all {place.split()[0]}"].append(ms)
    measured = {name: {**summary(each), "p99_ms": _p99_ms(each)} for name, each in by_kind.items() if len(each) > 1}
    write_json(arguments.json, {"benchmark": "cuts", "ms": measured, "places": by_place})
    rows = [row(place, times) for place, times in sorted(by_place.items()) + sorted(by_kind.items())]
    title = f"fault -> all training, the demonstration with {arguments.ranks} ranks"
    show(Table(title, ("where", "faults", "median ms", "p99 ms", "max ms"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
