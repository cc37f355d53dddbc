"""From ``kill -9`` of a rank to the next committed step on all ranks, phase by phase, with cold and forked starts.

``python benchmarks/recovery.py [--quick] [--json FILE]``: one job per case (ranks, model, start); ranks are killed in
turn, each at a random moment of a step, from outside. The phases are those of ``resilient-train report``; a new
process's own start is split by the marks that the job writes. ``--early``: a job for each kill instead, at a random
moment of its first second behind the first step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

from common import (
    HERE,
    MODELS,
    USUAL_MODELS,
    BenchmarkError,
    Case,
    Table,
    launcher,
    log_tail,
    show,
    started,
    summary,
    write_json,
)

from resilient_train.child_job import sigterm_unwinds
from resilient_train.events import Event
from resilient_train.observe.sinks import EVENTS_FILE, JsonLines, read_events
from resilient_train.observe.timeline import Recovery, RecoveryOutcome, recoveries
from resilient_train.session.injection import SIGNALS

POLL_S = 0.02
STARTS = ("cold", "forked", "built")
STEPS_BETWEEN = 5
"""Steps that every rank must have committed since the last fault before the next one hits."""
FACTS = ("kill_to_commit", "survivors_stopped")
MARKS = ("first_line", "imported", "group", "model", "optimizer", "session")
START = ("spawn", "interpreter", "imports", "group", "model", "optimizer", "session_open", "first_join")
PROTOCOL = ("DETECT", "AGREE", "REBUILD", "RESTORE", "RESUME")
PARTS = ("DETECT", "STOP", "REPLACE", *START, "AGREE", "REBUILD", "RESTORE", "copy", "RESUME", "first_step")
"""The columns of a recovery. START adds up to REPLACE; STOP runs at the same time as REPLACE does."""
RESTOCK_S = 1.5
"""Time between faults in which the agent has a spare again. Without one a fork takes some 40 ms more."""
INSIDE = (*START, "copy")
"""Columns that are part of the phase above them."""


class Hit(NamedTuple):
    """A fault and where it hit: ``step`` is the last that the victim is known to have committed."""

    rank: int
    incarnation: int
    time_ns: int
    step: int


class Commit(NamedTuple):
    step: int
    time_ns: int


class Follower:
    """Reads what has been appended to a file since it looked last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def news(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        found = []
        for line in data[:whole].splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # a process was killed in the middle of this line, and its successor went on behind it
        return found


class Watch:
    """What the benchmark knows of the running job."""

    def __init__(self, run_dir: Path, process: Popen[bytes], ranks: int, deadline: float) -> None:
        self._process = process
        self._deadline = deadline
        self._events = Follower(run_dir / EVENTS_FILE)
        self._marks = [Follower(run_dir.parent / f"marks_rank{rank}.jsonl") for rank in range(ranks)]
        self._log = run_dir.parent / "job.log"
        self.commits: list[list[Commit]] = [[] for _ in range(ranks)]
        self.marks: list[dict[tuple[int, str], int]] = [{} for _ in range(ranks)]
        self.processes: dict[int, dict[str, Any]] = {}
        self.ready = False
        self.waits = 0

    def update(self) -> None:
        for event in self._events.news():
            if event["kind"] == "spawned":
                self.processes[event["rank"]] = event
            self.ready = self.ready or event["kind"] == "standby_ready"
            self.waits += event["kind"] == "standby_waits"
        for rank, follower in enumerate(self._marks):
            for line in follower.news():
                if "step" in line:
                    self.commits[rank].append(Commit(line["step"], line["time_ns"]))
                else:
                    self.marks[rank][line["incarnation"], line["mark"]] = line["time_ns"]

    def wait_for_steps(self, count: int, since_ns: int) -> None:
        """Until all ranks have committed ``count`` steps since then. Raises BenchmarkError if the job ends or hangs."""
        while True:
            self.update()
            next_commit = next_common_commit(self.commits, since_ns)
            if next_commit and all(commits[-1].step >= next_commit.step + count - 1 for commits in self.commits):
                return
            if self._process.poll() is not None:
                raise BenchmarkError(f"the job ended with code {self._process.returncode}\n{log_tail(self._log)}")
            if time.monotonic() > self._deadline:
                raise BenchmarkError(f"the job came no further in time\n{log_tail(self._log)}")
            time.sleep(POLL_S)

    def wait_for_standby(self, waits: int) -> None:
        """Until replacements can be forked, and ``waits`` have come to where they wait in the script.

        Raises BenchmarkError if that does not come about.
        """
        while not self.ready or self.waits < waits:
            self.update()
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                raise BenchmarkError(f"no standby came about\n{log_tail(self._log)}")
            time.sleep(POLL_S)

    def step_s(self) -> float:
        """The length of the last steps of rank 0."""
        times = [commit.time_ns for commit in self.commits[0][-STEPS_BETWEEN:]]
        return statistics.median(b - a for a, b in itertools.pairwise(times)) / 1e9


def next_common_commit(commits: list[list[Commit]], since_ns: int) -> Commit | None:
    """The first step that every rank committed after ``since_ns``, and when the last of them had."""
    after = [{each.step: each.time_ns for each in of_rank if each.time_ns > since_ns} for of_rank in commits]
    common = set.intersection(*(set(each) for each in after))
    return Commit(min(common), max(each[min(common)] for each in after)) if common else None


def strike(watch: Watch, rank: int, kind: str, sink: JsonLines) -> Hit:
    """Hits the rank, and notes it as an injection, so that the timeline can say how long it took to be seen.

    The clock is read before: the agent may see it sooner than this process runs again.
    """
    spawned = watch.processes[rank]
    step = watch.commits[rank][-1].step
    hit = Hit(rank, spawned.get("incarnation", 0), time.time_ns(), step)
    os.kill(spawned["detail"]["pid"], SIGNALS[kind])
    detail = {"kind": kind, "at": "benchmark"}
    sink.write(Event("injected", hit.time_ns, rank=rank, incarnation=hit.incarnation, step=step, detail=detail))
    return hit


def command_of(case: Case, start: str, kills: int, limit_s: int, folder: Path) -> list[str]:
    """A job of the case in ``folder``, which is made."""
    run_dir = folder / "run"
    run_dir.mkdir(parents=True)
    command = [*launcher("resilient-run", case.ranks, run_dir), f"--max-restarts={kills + 10}"]
    command.append(f"--standby={int(start != 'cold')}")
    if start != "cold":
        command.append(f"--standby-depth={start}")
    return [*command, str(HERE / "recovery_job.py"), case.model, str(folder), str(limit_s)]


def run_early(case: Case, start: str, kills: int, limit_s: int, home: Path) -> dict[str, Any]:
    """One job per kill, in the first second behind the first step of all ranks."""
    moments = random.Random(kills)
    found, steps_ms = [], []
    for number in range(kills):
        folder = home / str(number)
        with started(command_of(case, start, 1, limit_s, folder), folder / "job.log") as process:
            watch = Watch(folder / "run", process, case.ranks, time.monotonic() + limit_s)
            watch.wait_for_steps(1, 0)
            time.sleep(moments.random())
            watch.update()
            sink = JsonLines(folder / "run" / EVENTS_FILE)
            hit = strike(watch, number % case.ranks, "kill", sink)
            sink.close()
            watch.wait_for_steps(3 * STEPS_BETWEEN, hit.time_ns)
        events = read_events(folder / "run" / EVENTS_FILE)
        story = recoveries(events)
        found.append(measured(hit, story, events, watch))
        steps_ms += undisturbed_steps_ms(watch.commits, story)
    return {**case._asdict(), "start": start, "step_ms": summary(steps_ms), "recoveries": found}


def run_case(case: Case, start: str, kills: int, limit_s: int, folder: Path) -> dict[str, Any]:
    """Runs one job, kills its ranks in turn, and measures what came of it."""
    run_dir = folder / "run"
    moments = random.Random(kills)
    hits: list[Hit] = []
    with started(command_of(case, start, kills, limit_s, folder), folder / "job.log") as process:
        watch = Watch(run_dir, process, case.ranks, time.monotonic() + limit_s)
        watch.wait_for_steps(3 * STEPS_BETWEEN, 0)
        sink = JsonLines(run_dir / EVENTS_FILE)
        for number in range(kills):
            if start != "cold":
                watch.wait_for_standby(number + 1 if start != "forked" else 0)
            time.sleep(RESTOCK_S + moments.random() * watch.step_s())
            watch.update()
            hits.append(strike(watch, number % case.ranks, "kill", sink))
            watch.wait_for_steps(STEPS_BETWEEN, hits[-1].time_ns)
        sink.close()
    events = read_events(run_dir / EVENTS_FILE)
    story = recoveries(events)
    return {
        "ranks": case.ranks,
        "model": case.model,
        "start": start,
        "step_ms": summary(undisturbed_steps_ms(watch.commits, story)),
        "recoveries": [measured(hit, story, events, watch) for hit in hits],
    }


def undisturbed_steps_ms(commits: list[list[Commit]], story: list[Recovery]) -> list[float]:
    """Times between two commits of rank 0 with no recovery in between."""
    return [
        (b.time_ns - a.time_ns) / 1e6
        for a, b in itertools.pairwise(commits[0])
        if not any(a.time_ns <= each.end_ns and b.time_ns >= each.fault_ns for each in story)
    ]


def measured(hit: Hit, story: list[Recovery], events: list[Event], watch: Watch) -> dict[str, Any]:
    """One recovery in milliseconds. Raises BenchmarkError if the kill led to none."""
    after = [each for each in story if hit.rank in each.lost and each.fault_ns >= hit.time_ns]
    found = [each for each in after if each.outcome is RecoveryOutcome.RESUMED]
    commit = next_common_commit(watch.commits, hit.time_ns)
    if not found or commit is None:
        raise BenchmarkError(f"no recovery in the events for {hit}")
    recovery = found[0]
    stop = recovery.span("STOP")
    return {
        "rank": hit.rank,
        "step": hit.step,
        "start": start_of(hit, events),
        "redone": bool(recovery.redone_by),
        "seen_by": recovery.seen_by.get(hit.rank, "unknown"),
        "way": [copy.way for copy in recovery.copies],
        "copy": max((copy.duration_ms for copy in recovery.copies if copy.duration_ms is not None), default=None),
        "kill_to_commit": (commit.time_ns - hit.time_ns) / 1e6,
        "survivors_stopped": stop.ms if stop else None,
        "committed_steps_lost": recovery.commits_lost,
        **{span.phase: span.ms for span in recovery.spans},
        **start_ms(hit, recovery, events, watch.marks[hit.rank]),
        "first_step": max(0.0, (commit.time_ns - recovery.end_ns) / 1e6),
    }


def start_of(hit: Hit, events: list[Event]) -> str:
    """How the replacement was started."""
    mine = (e for e in events if e.kind == "spawned" and (e.rank, e.incarnation) == (hit.rank, hit.incarnation + 1))
    return str(next(mine).detail["start"])


def start_ms(
    hit: Hit, recovery: Recovery, events: list[Event], marks: dict[tuple[int, str], int]
) -> dict[str, float | None]:
    """The start of the new process: between the fault being seen and its joining, from mark to mark."""
    incarnation = hit.incarnation + 1
    mine = [each for each in events if each.rank == hit.rank and each.incarnation == incarnation]
    times = {name: marks.get((incarnation, name)) for name in MARKS}
    spawned = next((each.time_ns for each in mine if each.kind == "spawned"), None)
    joined = next((each.time_ns for each in mine if each.kind == "joined"), None)
    edges = [recovery.fault_ns, spawned, *times.values(), joined]
    if spawned is not None:  # what a standby has done ahead took no time of the recovery
        edges = [edge if edge is None or not place else max(edge, spawned) for place, edge in enumerate(edges)]
    return {
        name: None if begin is None or end is None else (end - begin) / 1e6
        for name, begin, end in zip(START, edges, edges[1:], strict=False)
    }


def digest_of(result: dict[str, Any]) -> dict[str, Any]:
    """Medians and extremes over the recoveries of a case. ``ours``: all that is neither process start nor a step."""
    found = result["recoveries"]

    def all_of(name: str) -> list[float]:
        return [each[name] for each in found if each.get(name) is not None]

    ours = [sum(each.get(name) or 0.0 for name in (*PROTOCOL, "session_open", "first_join")) for each in found]
    numbers = {name: summary(all_of(name)) for name in (*FACTS, *PARTS)}
    return {**numbers, "ours": summary(ours)}


def tables(results: list[dict[str, Any]]) -> list[Table]:
    names = (f"{Case(each['ranks'], each['model']).describe()}, {each['start']}" for each in results)
    columns = ("ms, median (max)", *names)

    def row(label: str, name: str) -> tuple[str, ...]:
        cells = [each["summary"][name] for each in results]
        return (label, *(f"{c['median']:.1f} ({c['max']:.1f})" if c["n"] else "unknown" for c in cells))

    steps = [f"{each['step_ms']['median']:.1f} ({each['step_ms']['max']:.1f})" for each in results]
    whole = [
        ("recoveries", *(str(len(each["recoveries"])) for each in results)),
        ("of them so", *(str(sum(r["start"] == each["start"] for r in each["recoveries"])) for each in results)),
        row("kill -> next commit on all ranks", "kill_to_commit"),
        row("fault seen -> last survivor has left its step", "survivors_stopped"),
        row("all but process start and the step itself", "ours"),
        ("one undisturbed step", *steps),
    ]
    labels = {name: f"  of it {name.replace('_', ' ')}" if name in INSIDE else name.replace("_", " ") for name in PARTS}
    return [
        Table("recovery", columns, whole),
        Table("by phase; STOP runs beside REPLACE", columns, [row(labels[name], name) for name in PARTS]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(USUAL_MODELS))
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["cold", "forked"])
    parser.add_argument("--kills", type=int, help="recoveries of a case (default 12; 2 with --quick)")
    parser.add_argument("--early", action="store_true", help="each kill in the first second of a job of its own")
    parser.add_argument("--limit-s", type=int, default=600, help="longest time for a case")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few kills, numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    kills = arguments.kills or (2 if arguments.quick else 12)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rt-recovery-") as folder, sigterm_unwinds():
        cases = (Case(ranks, model) for model in arguments.models for ranks in arguments.ranks)
        for case, start in itertools.product(cases, arguments.starts):
            print(f"{case.describe()}, {start}: {kills} kills ...", flush=True)
            try:
                home = Path(folder) / f"{case.model}-{case.ranks}-{start}"
                run = run_early if arguments.early else run_case
                result = run(case, start, kills, arguments.limit_s, home)
            except BenchmarkError as error:
                raise SystemExit(f"{case.describe()}: {error}") from None
            results.append({**result, "summary": digest_of(result)})
            write_json(arguments.json, {"benchmark": "recovery", "quick": arguments.quick, "cases": results})
    for table in tables(results):
        show(table)


if __name__ == "__main__":
    main()
