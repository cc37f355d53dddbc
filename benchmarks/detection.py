"""How soon a fault is seen and all survivors are out of their step, on an idle and on a loaded machine; false alarms.

``python benchmarks/detection.py [--quick] [--json FILE]``: jobs whose ranks are killed (``kill -9``) or stopped
(``SIGSTOP``) from outside, each at a random moment of a step; the same beside as many busy loops as there are cores.
Then one job of ``--steps`` real steps with pauses in them (``jittery_job.py``), in which nobody may be taken for hung.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from recovery import STEPS_BETWEEN, Hit, Watch, strike, undisturbed_steps_ms

from resilient_train.child_job import sigterm_unwinds
from resilient_train.events import Event
from resilient_train.observe.sinks import EVENTS_FILE, JsonLines, read_events
from resilient_train.observe.timeline import recoveries
from resilient_train.session.injection import SIGNALS

WARM_S = 2.0
"""The hang watch knows what is usual after some looks at a job that trains; before that it is slower on purpose."""
HANG_FLOOR_S = 0.5
"""For the false alarms: a hundredth of the default, or no pause of this job could ever be an alarm."""


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Beside that many processes that never wait."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_case(case: Case, kind: str, faults: int, limit_s: int, folder: Path) -> dict[str, Any]:
    """One job, its ranks hit in turn."""
    run_dir = folder / "run"
    run_dir.mkdir(parents=True)
    command = [*launcher("resilient-run", case.ranks, run_dir), f"--max-restarts={faults + 10}"]
    command += [str(HERE / "recovery_job.py"), case.model, str(folder), str(limit_s)]
    moments = random.Random(faults)
    hits: list[Hit] = []
    with started(command, folder / "job.log") as process:
        watch = Watch(run_dir, process, case.ranks, time.monotonic() + limit_s)
        watch.wait_for_steps(STEPS_BETWEEN, 0)
        sink = JsonLines(run_dir / EVENTS_FILE)
        for number in range(faults):
            time.sleep(WARM_S + moments.random() * watch.step_s())
            watch.update()
            hits.append(strike(watch, number % case.ranks, kind, sink))
            watch.wait_for_steps(STEPS_BETWEEN, hits[-1].time_ns)
        sink.close()
    events = read_events(run_dir / EVENTS_FILE)
    story = recoveries(events)
    steps_ms = undisturbed_steps_ms(watch.commits, story)
    p99_ms = statistics.quantiles(steps_ms, n=100)[98]
    seen = [seen_after_ms(hit, kind, events) for hit in hits]
    stops = [each.span("STOP") for each in story]
    return {
        "ranks": case.ranks,
        "model": case.model,
        "kind": kind,
        "step_ms": summary(steps_ms),
        "p99_ms": p99_ms,
        "seen_ms": summary(seen),
        "stopped_ms": summary([span.ms for span in stops if span is not None]),
        "hang_aim_ms": 2 * p99_ms + 200,
    }


def seen_after_ms(hit: Hit, kind: str, events: list[Event]) -> float:
    """From the hit to the event that names the rank. Raises BenchmarkError if there is none."""
    wanted = "death_seen" if kind == "kill" else "hung"
    for event in events:
        if event.kind == wanted and event.rank == hit.rank and event.time_ns > hit.time_ns:
            return (event.time_ns - hit.time_ns) / 1e6
    raise BenchmarkError(f"rank {hit.rank} was hit and nobody saw it")


def run_jittery(steps: int, limit_s: int, folder: Path) -> dict[str, Any]:
    """Real steps with pauses; how many ranks were suspected, and how many given up."""
    run_dir = folder / "run"
    run_dir.mkdir(parents=True)
    command = ["env", f"RESILIENT_HANG_FLOOR_S={HANG_FLOOR_S}", *launcher("resilient-run", 2, run_dir)]
    command += [str(HERE / "jittery_job.py"), str(steps)]
    begun = time.monotonic()
    with started(command, folder / "job.log") as process, busy(1):
        finish(process, folder / "job.log", limit_s)
    events = read_events(run_dir / EVENTS_FILE)
    counts = {
        kind: sum(each.kind == kind for each in events)
        for kind in ("hung", "together", "suspect", "behind", "straggler")
    }
    ends = [each for each in events if each.kind == "session_end"]
    if len(ends) != 2 or any(each.detail["commits"] != steps for each in ends):
        raise BenchmarkError("the job did not make its steps")
    recovered = sum(each.kind == "fault" for each in events)
    return {"steps": steps, "seconds": round(time.monotonic() - begun, 1), "recoveries": recovered, **counts}


def tables(results: list[dict[str, Any]], jittery: dict[str, Any] | None) -> list[Table]:
    def cell(numbers: dict[str, Any]) -> str:
        return f"{numbers['median']:.1f} ({numbers['max']:.1f})" if numbers["n"] else "none"

    rows = []
    for each in results:
        name = f"{each['kind']}, {Case(each['ranks'], each['model']).describe()}, {each['load']}"
        aim = f"{each['hang_aim_ms']:.0f}" if each["kind"] == "stop" else ""
        rows.append((name, cell(each["step_ms"]), cell(each["seen_ms"]), aim, cell(each["stopped_ms"])))
    columns = ("ms, median (max)", "step", "fault -> seen", "2 x p99 + 200", "seen -> last survivor out of its step")
    found = [Table("detection", columns, rows)] if rows else []
    if jittery:
        found.append(Table("false alarms", tuple(jittery), [tuple(map(str, jittery.values()))]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(USUAL_MODELS))
    parser.add_argument("--kinds", nargs="+", choices=list(SIGNALS), default=list(SIGNALS))
    parser.add_argument("--faults", type=int, help="faults of a case (default 12; 2 with --quick)")
    parser.add_argument("--steps", type=int, help="of the job with pauses (default 100,000; 500 with --quick; 0: none)")
    parser.add_argument("--limit-s", type=int, default=1200, help="longest time for a job")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    faults = arguments.faults or (2 if arguments.quick else 12)
    steps = arguments.steps if arguments.steps is not None else (500 if arguments.quick else 100_000)
    results: list[dict[str, Any]] = []
    jittery = None
    cores = len(os.sched_getaffinity(0))
    cases = [Case(ranks, model) for model in arguments.models for ranks in arguments.ranks]
    with tempfile.TemporaryDirectory(prefix="rt-detection-") as folder, sigterm_unwinds():
        for case, kind, load in itertools.product(cases, arguments.kinds, (0, cores)):
            name = f"{kind}-{case.ranks}-{case.model}-{load}"
            print(f"{name}: {faults} faults ...", flush=True)
            with busy(load):
                result = run_case(case, kind, faults, arguments.limit_s, Path(folder) / name)
            results.append({**result, "load": f"{load} busy loops" if load else "idle"})
        if steps:
            print(f"{steps} steps with pauses ...", flush=True)
            jittery = run_jittery(steps, arguments.limit_s, Path(folder) / "jittery")
    write_json(arguments.json, {"benchmark": "detection", "cases": results, "false_alarms": jittery})
    for table in tables(results, jittery):
        show(table)


if __name__ == "__main__":
    main()
