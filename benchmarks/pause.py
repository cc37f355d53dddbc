"""From the request for a pause to all ranks standing, at random moments of a job that trains (TSP).

``python benchmarks/pause.py [--quick] [--json FILE]``: one job of four ranks, paused again and again. Measured from
before the request is sent to the event ``paused``, in milliseconds and in steps of the same job.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import HERE, BenchmarkError, Case, Table, launcher, log_tail, show, started, summary, write_json

from resilient_train.child_job import sigterm_unwinds
from resilient_train.errors import ResilientError
from resilient_train.launch.cli.asking import AnnouncedWait, Follower, ask, find
from resilient_train.protocol.messages import Pause, Query, Unpause

JOB = HERE.parent / "tests" / "process" / "jobs" / "train.py"
STEPS = 10_000_000
TRAINS_S = (0.5, 1.0)
"""Between a pause's end and the next request."""


def commits(run: Path) -> int:
    """How far the job is: the slowest rank."""
    rows = ask(run, Query()).status["ranks"]
    assert isinstance(rows, list)
    return min(row["commits"] or 0 for row in rows)


def measure(run: Path, rng: random.Random, limit_s: float) -> tuple[float, float]:
    """Lets the job train, and pauses it: milliseconds until all stand, and those of a step before."""
    before, begun = commits(run), time.monotonic()
    time.sleep(rng.uniform(*TRAINS_S))
    step_ms = (time.monotonic() - begun) * 1e3 / max(1, commits(run) - before)
    follower = Follower(run)
    asked_ns = time.time_ns()
    ask(run, Pause())
    stood_ns = follower.wait_for_pause(limit_s).time_ns
    ask(run, Unpause())
    return (stood_ns - asked_ns) / 1e6, step_ms


def await_training(run: Path, limit_s: float) -> None:
    """Until three updates are made: what is done once, in the first steps, is no step."""
    find(run, AnnouncedWait(limit_s, lambda _: None))
    deadline = time.monotonic() + limit_s
    while commits(run) < 3:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the job does not train within {limit_s:g} s")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pauses", type=int, help="default 40; 3 with --quick")
    parser.add_argument("--limit-s", type=float, default=60, help="longest time for the start, and for each pause")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    wanted, rng = arguments.pauses or (3 if arguments.quick else 40), random.Random(0)
    with tempfile.TemporaryDirectory(prefix="rt-pause-") as name, sigterm_unwinds():
        run, log = Path(name) / "run", Path(name) / "job.log"
        command = [*launcher("resilient-run", arguments.ranks, run), str(JOB), "--steps", str(STEPS)]
        with started(command, log) as process:
            try:
                await_training(run, arguments.limit_s)
                found = [measure(run, rng, arguments.limit_s) for _ in range(wanted)]
            except ResilientError as error:
                raise BenchmarkError(f"{error}\n{log_tail(log)}") from error
            process.send_signal(signal.SIGINT)
            process.wait(arguments.limit_s)
    whole, steps = zip(*found, strict=True)
    above = [max(0.0, ms - step_ms) for ms, step_ms in found]
    rows = []
    result: dict[str, object] = {"benchmark": "pause", "samples": [*map(list, found)]}
    for title, values in (("request -> all stand", whole), ("a step", steps), ("above a step", above)):
        p99 = statistics.quantiles(values, n=100, method="inclusive")[98]
        rows.append((title, str(len(values)), f"{statistics.median(values):.1f}", f"{p99:.1f}", f"{max(values):.1f}"))
        result[title] = {**summary(values), "p99": p99}
    in_steps = statistics.median(ms / step_ms for ms, step_ms in found)
    write_json(arguments.json, {**result, "in_steps": in_steps})
    case = Case(arguments.ranks, "tiny").describe()
    title = f"a pause, {case}; {in_steps:.2f} steps (median)"
    show(Table(title, ("", "pauses", "median ms", "p99 ms", "max ms"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
