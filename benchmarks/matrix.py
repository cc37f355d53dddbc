"""Every kind of fault at every place of a step, and what became of it: writes the table ``docs/matrix.md``.

One job for each kind and number of ranks, with all its places and samples; the job is that of the process tests. Then
a fault at every place of a recovery: from a kill, from an anomaly, where a step is computed again to verify it, on the
way to a pause. The rows of a job whose end is not that of the undisturbed one, bit for bit, say so, and the exit code
is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import about

from resilient_train.events import Event
from resilient_train.faults import (
    ANOMALIES,
    ANOMALY_PLACE,
    COST_NO_PROCESS,
    FLIP,
    FLIP_PLACES,
    PLACES,
    RECOVERY_PHASES,
    TARGETS,
    UCE_PLACES,
    Injection,
)
from resilient_train.observe.timeline import Recovery, Run
from resilient_train.testing import drill

JOB = Path(__file__).parent.parent / "tests" / "process" / "jobs" / "train.py"
WORLDS = (2, 3, 4)
HANG_TIMEOUT_S = 2
SURVIVOR, REPLACEMENT, ANOTHER, ANY = "a survivor", "the replacement", "another rank", "a rank"
KILL, ANOMALY, VERIFYING, PAUSE = "kill", "loss", "verifying", "pause"
"""What a recovery is for in which a fault hits. The last two are no faults: what hits in them is the first one."""
_AT_WORK = {VERIFYING: ["TRE"], PAUSE: ["TSP"]}
_VERIFY = {"RESILIENT_VERIFY_EVERY": "10"}
"""Then steps 9, 19, ... are computed twice."""
_KEEP = ("--save-mode", '{"steps": 1000000, "memory_steps": 1}')
"""A snapshot in memory of each step: so replicas are compared behind each."""
_PAUSES = ("--on-pause", "resume", "--pause-in")
_MASK = 0x400000
_LIMIT_S = 900.0
_EVERY, _LEAD = {"stop": 20}, {"stop": 80}
"""Steps from one fault to the next, and in front of the first one, where they are not 10: 80 take half a second, in
which the hang watch times enough of them for the rest of the job.
"""
_FIRST = ("COMPUTE", "backward")
"""Where the kill hits whose recovery a second fault disturbs."""


class Place(NamedTuple):
    """Of a step; or, with ``whom``, of a recovery, in which that one is hit."""

    phase: str
    at: str
    whom: str = ""

    def describe(self) -> str:
        return f"{self.phase} {self.at}" + (f" of {self.whom}" if self.whom else "")


_NO_UPDATE = Place("COMPUTE", "end")
"""Of a body that makes no update."""
_OF_UPDATES = ("READY", "UPDATING", "APPLIED")
"""Phases of a body that does: where two make one update, that of an odd step."""


class Kind(NamedTuple):
    """Rows of the table: a fault (``word`` of a plan) at ``places``, in a job of that variant."""

    name: str
    word: str
    places: Sequence[Place]
    variant: str = "base"
    target: str = ""
    worlds: Sequence[int] = WORLDS
    first: str = ""
    """What the recovery is for, where the places are those of one; or what the job does at each of these steps."""
    arguments: Sequence[str] = ()
    """Of the job."""
    environ: Mapping[str, str] = {}

    @property
    def every(self) -> int:
        """Steps from one fault to the next."""
        return _EVERY.get(self.word, 10)

    def step(self, number: int) -> int:
        """Where the fault of that number is, or what is in front of it; counted from 0."""
        return _LEAD.get(self.word, self.every) + self.every * number


class Sample(NamedTuple):
    """One time that a place was hit."""

    place: Place
    clauses: tuple[Injection, ...]


class Outcome(NamedTuple):
    """``ms``: 0 where all did not train again, and None where they never had to stop.

    ``same``: the job's end was that of the undisturbed one.
    """

    strategy: str
    ms: float | None
    same: bool


class Cell(NamedTuple):
    """What became of the samples of a place."""

    outcomes: tuple[Outcome, ...]

    @property
    def problems(self) -> list[str]:
        """Empty if all is well."""
        found = [] if all(each.same for each in self.outcomes) else ["NOT IDENTICAL"]
        return [*found, "NOT RECOVERED"] if any(each.ms == 0 for each in self.outcomes) else found

    def describe(self) -> str:
        times = [each.ms for each in self.outcomes if each.ms is not None]
        told = f"{statistics.median(times):.0f} ({max(times):.0f})" if times else "nothing"
        return ", ".join([told, *self.problems])


def places_of_a_step(*, without_update: bool = False) -> list[Place]:
    """``without_update``: the job has bodies that make none."""
    every = [Place(phase, at) for phase, places in PLACES.items() if phase not in RECOVERY_PHASES for at in places]
    if not without_update:
        every.remove(_NO_UPDATE)
    return every


def places_of_a_recovery(whom: str) -> list[Place]:
    """A survivor copies nothing, and a new process has no step to leave."""
    left_out = ("STOP", "start") if whom == REPLACEMENT else ("RESTORE", "start")
    every = [(phase, at) for phase in RECOVERY_PHASES for at in PLACES[phase]]
    return [Place(*place, whom) for place in every if place != left_out]


def kinds() -> Iterator[Kind]:
    """The rows, from above."""
    every = places_of_a_step()
    yield Kind("process killed (SIGKILL)", "kill", every)
    yield Kind("the same, two batches to an update", "kill", places_of_a_step(without_update=True), "accumulate")
    yield Kind("the same, two optimizers", "kill", every, "two")
    # There the update counts when the body is over: nothing of it is behind that.
    of_undo = [place for place in every if place != Place("APPLIED", "end")]
    yield Kind("the same, `undo=True`", "kill", of_undo, "undo")
    yield Kind("the same, in a step that is computed twice", "kill", every, environ=_VERIFY)
    yield Kind("the same, in a step behind which all pause", "kill", every, first=PAUSE)
    yield Kind("process stopped (SIGSTOP)", "stop", every)
    yield Kind("endless loop that holds the GIL", "loop", every)
    yield Kind("collectives of a rank broken", "hcce", every)
    for target in TARGETS:
        yield Kind(f"device memory: {target}", "uce", [Place(*place) for place in UCE_PLACES], target=target)
    for what in ANOMALIES:
        yield Kind(f"the {what} is not a number", what, [Place(*ANOMALY_PLACE)])
    yield from flips()
    yield from in_recoveries()


def flips() -> Iterator[Kind]:
    """Without what may be of no consequence: activations that nothing uses, buffers that DDP overwrites."""
    for target in ("param", "optimizer", "gradient"):
        held = [Place(*place) for place in FLIP_PLACES[target] if place != ("COMPUTE", "backward")]
        yield Kind(f"a bit flipped: {target}", FLIP, held, target=target, arguments=_KEEP)
    own = "the same of a rank's own gradient, the step computed twice"
    yield Kind(own, FLIP, [Place("COMPUTE", "backward")], target="gradient", environ=_VERIFY)


def in_recoveries() -> Iterator[Kind]:
    """A fault at every place of one, or of what goes the same way."""
    for word, name in {"kill": "killed", "stop": "stopped", "hcce": "connections cut"}.items():
        # Of two ranks the survivor is the only one with the state.
        worlds = WORLDS[1:] if word != "hcce" else WORLDS
        after = f"in the recovery from a kill: {name}"
        yield Kind(after, word, places_of_a_recovery(SURVIVOR), worlds=worlds, first=KILL)
        yield Kind(after, word, places_of_a_recovery(REPLACEMENT), first=KILL)
        yield Kind(f"as all go back for an anomaly: {name}", word, places_of_a_recovery(ANOTHER), first=ANOMALY)
        again = f"as a step is computed again: {name}"
        yield Kind(again, word, places_of_a_recovery(ANY), first=VERIFYING, environ=_VERIFY)
        yield Kind(f"on the way to a pause: {name}", word, places_of_a_recovery(ANY), first=PAUSE)


def samples_of(kind: Kind, ranks: int, count: int) -> list[Sample]:
    """Those of one job: each place so many times, going round the ranks."""
    born = [0] * ranks
    places = [place for _ in range(count) for place in kind.places]
    steps = (_step_of(kind, place, number) for number, place in enumerate(places))
    return [_sample(kind, *each, born) for each in zip(places, itertools.cycle(range(ranks)), steps)]


def _step_of(kind: Kind, place: Place, number: int) -> int:
    step = kind.step(number)
    if kind.variant == "accumulate" and place.phase in _OF_UPDATES:
        return step + 1
    return step - (kind.environ == _VERIFY)


def _sample(kind: Kind, place: Place, rank: int, step: int, born: list[int]) -> Sample:
    """``born``: by rank, the number of the process that will be there. Counted on."""
    clauses = []
    if kind.first in (KILL, ANOMALY):
        where = _FIRST if kind.first == KILL else ANOMALY_PLACE
        clauses.append(Injection(kind.first, rank, *where, step=step, incarnation=born[rank], value=float("nan")))
        born[rank] += kind.first == KILL
        rank = rank if place.whom == REPLACEMENT else (rank + 1) % len(born)
    named = step if place.whom != REPLACEMENT else -1
    clauses.append(
        Injection(
            kind.word,
            rank,
            place.phase,
            place.at,
            step=named,
            incarnation=born[rank],
            target=kind.target,
            value=float("nan") if kind.word in ANOMALIES else 0.0,
            mask=_MASK if kind.word == FLIP else 0,
        )
    )
    for other in range(len(born)):  # where replicas differ all start again
        born[other] += (kind.word == FLIP and not kind.environ) or (other == rank and kind.word not in COST_NO_PROCESS)
    return Sample(place, tuple(clauses))


class Jobs:
    """Runs the jobs; an undisturbed one is run once for each variant, number of ranks and of steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: dict[tuple[str, int, int], str | None] = {}

    def _run(self, name: str, ranks: int, kind: Kind, steps: int, faults: str) -> tuple[int | None, Run, list[Event]]:
        command = (str(JOB), "--steps", str(steps), "--variant", kind.variant, *kind.arguments)
        if kind.first == PAUSE:
            command += (*_PAUSES, *map(str, range(kind.step(0), steps, kind.every)))
        options = drill.DrillOptions(command=command, run_dir=self._folder / name, ranks=ranks)
        os.environ |= kind.environ
        try:
            return drill.run_once(options, "run", faults, _LIMIT_S)
        finally:
            for each in kind.environ:
                del os.environ[each]

    def undisturbed(self, ranks: int, variant: str, steps: int) -> str | None:
        """Digest of its end."""
        key = variant, ranks, steps
        if key not in self._digests:
            name = "-".join(map(str, ("undisturbed", *key)))
            self._digests[key] = self._run(name, ranks, Kind("", "", (), variant), steps, "")[1].digest
        return self._digests[key]

    def run(self, number: int, kind: Kind, ranks: int, count: int) -> dict[Place, Cell]:
        """What became of each place."""
        found: dict[Place, list[Outcome]] = defaultdict(list)
        samples = samples_of(kind, ranks, count)
        steps = kind.step(len(samples) - 1) + 4
        plan = "; ".join(clause.describe() for sample in samples for clause in sample.clauses)
        expected = self.undisturbed(ranks, kind.variant, steps)
        code, story, events = self._run(f"{number}-{ranks}", ranks, kind, steps, plan)
        same = code == 0 and story.digest is not None and story.digest == expected
        for sample, following in itertools.zip_longest(samples, samples[1:]):
            until_ns = _hit_ns(following, events) if following else sys.maxsize
            recoveries = [each for each in story.recoveries if each.fault_ns < until_ns]
            found[sample.place].append(Outcome(*_outcome(kind, sample, events, recoveries), same))
        return {place: Cell(tuple(each)) for place, each in found.items()}


def _hit_ns(sample: Sample, events: Sequence[Event]) -> int:
    """When its first fault was."""
    hits = (event.time_ns for event in events if event.kind == "injected" and drill.is_of(sample.clauses[0], event))
    return next(hits, sys.maxsize)


def _outcome(
    kind: Kind, sample: Sample, events: Sequence[Event], recoveries: Sequence[Recovery]
) -> tuple[str, float | None]:
    """By what it was recovered from, and milliseconds from its first fault until all train again."""
    if kind.word == FLIP:
        return _outcome_of_flip(sample.clauses[0], events)
    blows = [drill.outcome_of(clause, events, recoveries) for clause in sample.clauses]
    if not all(blow.happened for blow in blows):
        return "nothing", 0.0
    if kind.word == "hcce" and kind.first in _AT_WORK and not blows[0].recovered:
        return ", ".join(_AT_WORK[kind.first]), None
    anomaly = {what.upper(): "TRE" for what in ANOMALIES}
    by = [each for blow in blows for each in anomaly.get(blow.strategy, blow.strategy).split(", ")]
    return ", ".join(dict.fromkeys(_AT_WORK.get(kind.first, []) + by)), blows[0].recovery_ms or 0.0


def _outcome_of_flip(clause: Injection, events: Sequence[Event]) -> tuple[str, float]:
    """Somebody notices, and what comes of that."""
    seen = itertools.dropwhile(lambda e: e.kind != "injected" or not drill.is_of(clause, e), events)
    by, hit = list[str](), 0
    for event in seen:
        hit = hit or event.time_ns
        match event.kind:
            case "replicas_differ" | "deviates":
                by.append({"replicas_differ": "compared", "deviates": "TRE"}[event.kind])
            case "restart_all":
                by.append("RSC")
            case "fault" if by:
                by.append("ARF")
            case "started" | "resumed" if by:
                return ", ".join(dict.fromkeys(by)), (event.time_ns - hit) / 1e6
    return "nothing", 0.0


class Known:
    """What was measured before, at this commit: the hour can be split. ``path``: None for nothing."""

    def __init__(self, path: Path | None, samples: int) -> None:
        self._path = path
        self._held: dict[str, Any] = {"commit": about()["commit"], "samples": samples, "cells": {}}
        if path is not None and path.exists():
            held = json.loads(path.read_text())
            if any(held[name] != self._held[name] for name in ("commit", "samples")):
                raise SystemExit(f"{path} is of commit {held['commit']}, {held['samples']} samples: name another file")
            self._held = held

    @staticmethod
    def _name(kind: Kind, ranks: int) -> str:
        return f"{kind.name}, {kind.places[0].whom}, {ranks} ranks"

    def cells(self, kind: Kind, ranks: int) -> dict[Place, Cell]:
        """Of one job; empty if it was not run."""
        held = self._held["cells"].get(self._name(kind, ranks), [])
        return {Place(*place): Cell(tuple(Outcome(*each) for each in outcomes)) for place, outcomes in held}

    def add(self, kind: Kind, ranks: int, cells: dict[Place, Cell]) -> None:
        """Writes it down."""
        self._held["cells"][self._name(kind, ranks)] = [(place, cell.outcomes) for place, cell in cells.items()]
        if self._path is not None:
            self._path.write_text(json.dumps(self._held))


def rows(kind: Kind, results: dict[int, dict[Place, Cell]]) -> Iterator[str]:
    """Of the table."""
    for place in kind.places:
        cells = {ranks: results[ranks][place] for ranks in kind.worlds}
        how = " / ".join(dict.fromkeys(each.strategy for cell in cells.values() for each in cell.outcomes))
        times = " | ".join(cells[ranks].describe() if ranks in cells else "" for ranks in WORLDS)
        yield f"| {kind.name} | {place.describe()} | {how} | {times} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=JOB.parents[3] / "docs" / "matrix.md")
    parser.add_argument("--samples", type=int, default=5, help="times that each place is hit")
    parser.add_argument("--only", default="", help="kinds whose name has this in it; writes no table")
    parser.add_argument("--json", type=Path, help="what is in this file is not measured again; what is new is added")
    arguments = parser.parse_args()
    known = Known(arguments.json, arguments.samples)
    switches = {"MS_ENABLE_TFT": "{ARF:1,UCE:1,HCCE:1,TTP:1,TRE:1,TSP:1}"}
    os.environ |= {"RESILIENT_HANG_TIMEOUT_S": str(HANG_TIMEOUT_S), "OMP_NUM_THREADS": "1", **switches}
    table = ["| fault | place | recovered by | " + " | ".join(f"{ranks} ranks, ms" for ranks in WORLDS) + " |"]
    table.append("|---|---|---|" + "---|" * len(WORLDS))
    print("\n".join(table), flush=True)
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="rt-matrix-") as folder:
        jobs = Jobs(Path(folder))
        for number, kind in enumerate(kind for kind in kinds() if arguments.only in kind.name):
            results = {}
            for ranks in kind.worlds:
                results[ranks] = known.cells(kind, ranks) or jobs.run(number, kind, ranks, arguments.samples)
                known.add(kind, ranks, results[ranks])
            cells += [cell for result in results.values() for cell in result.values()]
            table += (found := list(rows(kind, results)))
            print("\n".join(found), flush=True)
    if not arguments.only:
        arguments.out.write_text(_head(len(cells), arguments.samples) + "\n".join(table) + "\n")
    return int(any(cell.problems for cell in cells))


def _head(cells: int, samples: int) -> str:
    machine = about()
    return (
        "# Every fault at every place\n\n"
        f"Written by `benchmarks/matrix.py` on {machine['time'][:10]} at commit {machine['commit']}, on "
        f"{machine['cpus']} cores: {cells} cells, {samples} faults each. Milliseconds from the injection (of the first "
        "fault, where there are two) until all ranks train again: the median, and the longest. "
        "Everything is at its defaults, so a new process is [a fork](how-to/standbys.md), but for `TRE:1`, and for "
        f"`RESILIENT_HANG_TIMEOUT_S={HANG_TIMEOUT_S}` instead of [at least a minute](how-to/hangs.md#when): that is "
        "what an endless loop waits for. Where bits are flipped memory keeps each step: replicas are compared behind "
        "each (*compared, RSC*: they differ, and all start again from memory); where steps are computed twice it is "
        "one in ten. A pause lasts no longer than it takes all to stand. A stopped process is found by what a usual "
        "step takes, and after 2 s where no steps have been timed yet: in the first steps, and in those behind another "
        "recovery. *Nothing*: connections that were cut are made anew a moment later anyway, and nobody stops for it. "
        "Unless a row says otherwise the run ended with the parameters and the optimizer state of the undisturbed one, "
        "bit for bit.\n\n"
    )


if __name__ == "__main__":
    sys.exit(main())
