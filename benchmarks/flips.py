"""Bits that are flipped without a sign, and what becomes of them.

``python benchmarks/flips.py [--flips 1000] [--seed 0] [--ranks 2] [--ways compared twice defaults] [--json FILE]``: of
each flip the rank, the step, the element and the bits (one, or up to four) are drawn. Each ends in one column::

    found            the job went back, or computed again, and all ranks have the bits of the undisturbed run
    masked           nobody has noticed, and the bits are right: it was rounded away, or nothing used it
    told             a rank has said that its state is NaN, and nobody goes back for that (without TRE)
    healed           nobody has noticed, all replicas are equal, and the bits are others
    not replicated   the same, of what one rank alone has when it is flipped: no comparison of replicas can see it
    wrong            it was found, and the bits are others; or another rank was named, or of three replicas and more
                     not the one; or replicas differ, and nobody has noticed; or the job ended

*Named*: of those that were found, so many name the flipped rank. Of two replicas that differ nobody may know who was
wrong. *Bits*: parameters, moments, buffers and random numbers of each rank, so many steps behind the flip that each
comparison that is due has been made. Three ways::

    compared   a snapshot in memory of each step, so replicas compare behind each; TRE:1. For what replicas hold
    twice      each step is computed twice (RESILIENT_VERIFY_EVERY=1); TRE:1. For what one rank alone has
    defaults   no setting at all: replicas compare every 32 updates, and the job saves every 64. Flips of all kinds

``--clean N``: N steps without a flip in all ways and kinds of jobs together, where nothing may be found. Each eighth is
computed twice there. What TRE takes for a spike is counted apart: a norm may really be that large.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, BenchmarkError, Table, finish, launcher, log_tail, show, started, write_json

from resilient_train.child_job import sigterm_unwinds

Kind = tuple[str, str, str]
"""What is flipped, in which phase of a step, at which place of it."""
HELD: dict[Kind, str] = {
    ("param", "COMPUTE", "start"): "a parameter, before the bodies",
    ("param", "UPDATING", "start"): "a parameter, before the update",
    ("optimizer", "COMPUTE", "start"): "a moment of AdamW, before the bodies",
    ("optimizer", "UPDATING", "start"): "a moment of AdamW, before the update",
    ("gradient", "UPDATING", "start"): "an averaged gradient, before the update",
}
"""What a replica holds, or is about to apply; in words."""
ALONE: dict[Kind, str] = {
    ("gradient", "COMPUTE", "backward"): "a rank's own gradient, in the backward pass",
    ("activation", "COMPUTE", "forward"): "an activation, in the forward pass",
    ("buffer", "COMPUTE", "start"): "a buffer of BatchNorm, before the bodies",
}
"""What a rank gives to the others, or has alone."""
COLUMNS = ("found", "masked", "told", "healed", "not replicated", "wrong")
UNSEEN = ("healed", "not replicated")
BITS = ("sign", "exponent", "upper mantissa", "lower mantissa")
FINDS = ("replicas_differ", "anomaly", "late_anomaly", "holds_nan", "deviates")
NAMES = {"replicas_differ": "alone", "held_wrong": "ranks", "deviates": "ranks"}
"""Where each of these events names ranks."""
CLEAN = {"plain": [], "bf16": ["--bf16"], "accumulating": ["--accumulate", "2"]}
"""Dropout, BatchNorm and clipping are in all of them."""
_TRE = {"MS_ENABLE_TFT": "{ARF:1,HCCE:1,TRE:1}"}


class Way(NamedTuple):
    """How jobs are run, and what is flipped in them."""

    kinds: tuple[Kind, ...]
    environ: Mapping[str, str]
    save: str
    """``--save`` of the job."""
    look: int
    """So many steps behind a flip the bits are compared: nothing is found later."""
    distances: tuple[int, int]
    """From one flip of a job to the next one, at least and at most. Longer than ``look``."""
    a_job: int
    """So many flips at most."""

    def longest(self, flips: int) -> int:
        """So many steps at most has a job with some of so many flips."""
        return self.distances[1] * min(self.a_job, flips) + self.look + 1


WAYS = {
    "compared": Way((*HELD,), _TRE, "memory", 8, (10, 30), 50),
    "twice": Way((*ALONE,), {**_TRE, "RESILIENT_VERIFY_EVERY": "1"}, "", 8, (10, 30), 50),
    # Far enough apart that a newer checkpoint is there, and that comparisons are not those of a beginning.
    "defaults": Way((*HELD, *ALONE), {}, "storage", 34, (100, 200), 20),
}


class Flip(NamedTuple):
    """One, to come."""

    kind: Kind
    rank: int
    element: int
    mask: int

    def clause(self, step: int) -> str:
        target, phase, at = self.kind
        where = f"rank={self.rank} step={step} phase={phase} at={at}"
        return f"flip {where} target={target} index={self.element} mask={self.mask:#x}"

    @property
    def what(self) -> str:
        return {**HELD, **ALONE}[self.kind]

    @property
    def bits(self) -> str:
        """Where the highest one lies in a float32."""
        top = self.mask.bit_length() - 1
        return BITS[0 if top == 31 else 1 if top >= 23 else 2 if top >= 12 else 3]


class Ended(NamedTuple):
    """What has become of it."""

    flip: Flip
    step: int
    column: str
    how: str
    """What has found it, or what was wrong; empty: nothing."""
    named: bool
    """The flipped rank was named, and nobody else."""


class Held(NamedTuple):
    """Two digests: of what replicas have in common, of what a rank has alone."""

    shared: str
    own: str


def draw(count: int, seed: int, ranks: int) -> list[Flip]:
    chance = random.Random(seed)
    kinds = (*HELD, *ALONE)
    found = []
    for number in range(count):
        bits = 1 if number % 2 == 0 else chance.randint(2, 4)
        mask = sum(1 << bit for bit in chance.sample(range(32), bits))
        found.append(Flip(kinds[number % len(kinds)], chance.randrange(ranks), chance.randrange(1 << 30), mask))
    return found


def run(
    folder: Path, environ: Mapping[str, str], arguments: Sequence[str], ranks: int, limit_s: float
) -> tuple[int, list[dict[str, Any]]]:
    """Its exit code, and what it has told."""
    folder.mkdir()
    log, run_dir = folder / "log", folder / "run"
    job = [str(HERE / "flips_job.py"), "--records", str(folder), *arguments]
    command = [*launcher("resilient-run", ranks, run_dir), "--max-restarts", "100000", *job]
    with started(command, log, environ) as process:
        try:
            finish(process, log, limit_s)
        except BenchmarkError:
            if process.poll() is None:
                raise
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return process.returncode, events


# -- flips


def reference(folder: Path, steps: int, ranks: int) -> list[dict[int, Held]]:
    """What each rank holds behind each step, undisturbed."""
    code, _ = run(folder, {}, ["--record-all", "--steps", str(steps)], ranks, 600)
    if code:
        raise BenchmarkError(f"the undisturbed job ended with {code}\n{log_tail(folder / 'log')}")
    rows = (json.loads((folder / f"held{rank}.json").read_text()) for rank in range(ranks))
    return [{int(step): Held(*now) for step, now in each.items()} for each in rows]


def campaign(name: str, flips: Sequence[Flip], top: Path, ranks: int, seed: int) -> Iterator[Ended]:
    """Jobs until each has hit."""
    way, left = WAYS[name], [*flips]
    expected = reference(top / f"{name}_undisturbed", way.longest(len(left)), ranks)
    for number in itertools.count():
        if not left:
            return
        chance = random.Random(f"{seed} {name} {number}")
        gaps = (chance.randint(*way.distances) for _ in left[: way.a_job])
        plan = dict(zip(itertools.accumulate(gaps), left, strict=False))
        ended = [*_job(top / f"{name}{number}", way, plan, top / f"{name}_undisturbed", expected)]
        yield from ended
        left = left[len(ended) :]


def _job(
    folder: Path, way: Way, plan: Mapping[int, Flip], undisturbed: Path, expected: Sequence[Mapping[int, Held]]
) -> Iterator[Ended]:
    """Ends behind the first one whose bits are not the right ones."""
    written = folder.with_suffix(".json")
    looks = [step + way.look for step in plan]
    written.write_text(json.dumps({"flips": {step: flip.clause(step) for step, flip in plan.items()}, "looks": looks}))
    arguments = ["--plan", str(written), "--reference", str(undisturbed), "--steps", str(looks[-1] + 1)]
    arguments += ["--save", way.save] if way.save else []
    ranks = len(expected)
    code, events = run(folder, way.environ, arguments, ranks, 120 + 10 * len(plan))
    records = [_records(folder / f"rank{rank}.jsonl") for rank in range(ranks)]
    hits = {event["step"]: index for index, event in enumerate(events) if event["kind"] == "flipped"}
    for (step, flip), look, following in zip(plan.items(), looks, [*[*plan][1:], None], strict=True):
        if step not in hits:
            raise BenchmarkError(f"{flip.clause(step)}: nothing was flipped\n{log_tail(folder / 'log')}")
        end = len(events) if following is None else hits.get(following, len(events))
        seen = [event for event in events[hits[step] : end] if event["kind"] in (*FINDS, *NAMES)]
        held = [_last(each, look, following) for each in records]
        known = [each for each in held if each is not None]
        if len(known) < ranks:
            yield Ended(flip, step, "wrong", f"the job ended with {code}", False)
            return
        right = [each[look] for each in expected]
        named = any(_named(event) for event in seen)
        yield Ended(flip, step, *_column(flip, seen, known, right), named)
        if known != right:
            return


def _records(path: Path) -> list[tuple[int, Held]]:
    return [(step, Held(*now)) for step, *now in map(json.loads, path.read_text().splitlines())]


def _last(records: Iterable[tuple[int, Held]], step: int, following: int | None) -> Held | None:
    """What a rank held behind the step when it last ran, before the next flip."""
    before = itertools.takewhile(lambda row: following is None or row[0] < following, records)
    return {number: held for number, held in before if number == step}.get(step)


def _column(
    flip: Flip, seen: Sequence[Mapping[str, Any]], held: Sequence[Held], right: Sequence[Held]
) -> tuple[str, str]:
    """And what has found it, or what is wrong."""
    how = " ".join(dict.fromkeys(event["kind"] for event in seen))
    if misplaced := [told for event in seen if (told := _misplaced(flip, event, len(held)))]:
        return "wrong", misplaced[0]
    if [*held] == [*right]:
        return "found" if seen else "masked", how
    if how == "holds_nan":
        return "told", how
    if seen:
        return "wrong", f"{how}, and other bits"
    if len({each.shared for each in held}) > 1:
        return "wrong", "replicas differ, and nobody has noticed"
    return "not replicated" if flip.kind in ALONE else "healed", ""


def _named(event: Mapping[str, Any]) -> list[int]:
    where = NAMES.get(event["kind"])
    ranks: list[int] = event["detail"].get(where, [])
    return ranks


def _misplaced(flip: Flip, event: Mapping[str, Any], ranks: int) -> str:
    """Whether another rank is named. Where a majority stands against it, nobody is one as well; of two replicas who was
    wrong is known later, or never.
    """
    named = _named(event)
    nobody = event["kind"] not in NAMES or (event["kind"] == "replicas_differ" and ranks == 2)
    right = named == [flip.rank] or (not named and nobody)
    return "" if right else f"{event['kind']} names {named}"


def columns_table(name: str, ended: Sequence[Ended], about: str) -> Table:
    """By what is flipped: how many ended in each column."""
    rows = []
    for what in dict.fromkeys(each.flip.what for each in ended):
        counts = collections.Counter(each.column for each in ended if each.flip.what == what)
        named = sum(each.named for each in ended if each.flip.what == what and each.column == "found")
        rows.append((what, str(counts.total()), *(str(counts[column]) for column in COLUMNS), str(named)))
    return Table(f"{name}, {about}", ("what is flipped", "flips", *COLUMNS, "named"), rows)


def unseen_table(name: str, ended: Sequence[Ended], about: str) -> Table:
    """By what is flipped, and where the highest bit lies: how many of them were not found and have other bits."""
    rows = []
    for what in dict.fromkeys(each.flip.what for each in ended):
        mine = [[each for each in ended if each.flip.what == what and each.flip.bits == bits] for bits in BITS]
        unseen = (sum(each.column in UNSEEN for each in those) for those in mine)
        rows.append((what, *(f"{count} / {len(those)}" for count, those in zip(unseen, mine, strict=True))))
    return Table(f"{name}, {about}: not found and other bits, of so many", ("the highest bit is in", *BITS), rows)


# -- no flips


class Clean(NamedTuple):
    """A job without a flip, and what was found in it all the same."""

    way: str
    job: str
    steps: int
    verified: int
    """Steps that were computed twice."""
    replicas_differ: int
    deviates: int
    spikes: int
    code: int
    steps_per_s: float


def clean(name: str, job: str, steps: int, top: Path, ranks: int) -> Clean:
    way = WAYS[name]
    environ = {**way.environ, **({"RESILIENT_VERIFY_EVERY": "8"} if name == "twice" else {})}
    save = ["--save", way.save] if way.save else []
    begun = time.monotonic()
    arguments = ["--steps", str(steps), *save, *CLEAN[job]]
    code, events = run(top / f"clean_{name}_{job}", environ, arguments, ranks, 120 + 0.1 * steps)
    counts = collections.Counter(event["kind"] for event in events)
    found = (counts[kind] for kind in ("verified", "replicas_differ", "deviates", "anomaly"))
    return Clean(name, job, steps, *found, code, round(steps / (time.monotonic() - begun), 1))


def clean_table(rows: Sequence[Clean], about: str) -> Table:
    columns = ("way", "job", "steps", "of them twice", "replicas differ", "deviates", "spikes", "exit code", "a second")
    return Table(f"without a flip, {about}", columns, [tuple(map(str, row)) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1000, help="0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--clean", type=int, metavar="STEPS", default=0)
    parser.add_argument("--quick", action="store_true", help="a few, to see that it runs")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    flips = draw(16 if asked.quick else asked.flips, asked.seed, asked.ranks)
    about = f"{asked.ranks} ranks, seed {asked.seed}"
    tables: list[Table] = []
    result: dict[str, Any] = {"benchmark": "flips", "flips": {}, "clean": []}
    with tempfile.TemporaryDirectory(prefix="rt-flips-") as folder, sigterm_unwinds():
        for name in asked.ways if flips else []:
            mine = [flip for flip in flips if flip.kind in WAYS[name].kinds]
            ended = [*campaign(name, mine, Path(folder), asked.ranks, asked.seed)]
            result["flips"][name] = [{**each._asdict(), "flip": each.flip.clause(each.step)} for each in ended]
            tables += [columns_table(name, ended, about), unseen_table(name, ended, about)]
            for table in tables[-2:]:
                show(table)
            for each in ended:
                if each.column == "wrong":
                    print(f"wrong: {each.flip.clause(each.step)}: {each.how}", flush=True)
            write_json(asked.json, result, tables)
        jobs = [*itertools.product(asked.ways, CLEAN)] if asked.clean else []
        rows = [clean(*each, asked.clean // len(jobs), Path(folder), asked.ranks) for each in jobs]
        if rows:
            result["clean"] = [row._asdict() for row in rows]
            tables.append(clean_table(rows, f"{asked.ranks} ranks"))
            show(tables[-1])
    write_json(asked.json, result, tables)


if __name__ == "__main__":
    main()
