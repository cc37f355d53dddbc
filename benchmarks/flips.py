"""Bits that are flipped without a sign, and what becomes of them.

``python benchmarks/flips.py [--flips 1000] [--seed 0] [--ranks 2] [--json FILE]``: of each flip the rank, the element
and the bits (one, or up to four) are drawn; one hits every ten steps. Each ends in one column::

    found     the job went back, or computed again, and has the bits of the undisturbed run
    masked    nobody has noticed, and the bits are right: it was rounded away, or nothing used it
    healed    nobody has noticed, all replicas are equal, and the bits are others
    wrong     it was found, and the bits are others; or another rank was named; or the job ended

Two kinds of jobs: replicas are compared behind each step (a snapshot in memory of each, ``TRE:1``), for what one
replica alone holds otherwise; and every step is computed twice (``RESILIENT_VERIFY_EVERY=1``), for what all
replicas take over.
``--clean N``: so many steps of each kind without a flip, where nothing may be found.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, BenchmarkError, Table, finish, launcher, log_tail, show, started, write_json

FIRST, GAP, A_JOB = 20, 10, 50
"""The first flip of a job hits in that step, the next ones so many steps later; so many at most."""
LOOK = GAP - 2
"""So many steps behind a flip the bits are compared."""
COMPARED = (
    ("param", "COMPUTE", "start"),
    ("param", "UPDATING", "start"),
    ("optimizer", "COMPUTE", "start"),
    ("optimizer", "UPDATING", "start"),
    ("gradient", "UPDATING", "start"),
)
"""What a replica holds, or is about to apply."""
COMPUTED_TWICE = (
    ("gradient", "COMPUTE", "backward"),
    ("activation", "COMPUTE", "forward"),
    ("buffer", "COMPUTE", "start"),
)
"""What a rank gives to the others, or has alone."""
ENVIRON = {
    "compared": {"MS_ENABLE_TFT": "{ARF:1,HCCE:1,TRE:1}"},
    "computed twice": {"MS_ENABLE_TFT": "{ARF:1,HCCE:1,TRE:1}", "RESILIENT_VERIFY_EVERY": "1"},
}
FINDS = ("replicas_differ", "anomaly", "deviates")
CLEAN = {"": [], "bf16": ["--bf16"], "accumulating": ["--accumulate", "2"]}


class Flip(NamedTuple):
    """One, to come."""

    kind: tuple[str, str, str]
    rank: int
    index: int
    mask: int

    def clause(self, step: int, incarnation: int) -> str:
        target, phase, at = self.kind
        where = f"rank={self.rank} step={step} phase={phase} at={at} incarnation={incarnation}"
        return f"flip {where} target={target} index={self.index} mask={self.mask:#x}"


class Ended(NamedTuple):
    """What has become of it."""

    flip: Flip
    column: str
    how: str
    """What has found it; empty: nothing."""
    what: str
    """The highest of its bits."""


def draw(count: int, seed: int, ranks: int) -> list[Flip]:
    chance = random.Random(seed)
    kinds = (*COMPARED, *COMPUTED_TWICE)
    found = []
    for number in range(count):
        bits = 1 if number % 2 == 0 else chance.randint(2, 4)
        mask = sum(1 << bit for bit in chance.sample(range(32), bits))
        found.append(Flip(kinds[number % len(kinds)], chance.randrange(ranks), chance.randrange(1 << 30), mask))
    return found


def place_of(mask: int) -> str:
    top = mask.bit_length() - 1
    if top == 31:
        return "sign"
    return "exponent" if top >= 23 else "upper mantissa" if top >= 12 else "lower mantissa"


def run(
    folder: Path, way: str, arguments: Sequence[str], ranks: int, limit_s: float
) -> tuple[int, list[dict[str, Any]]]:
    """Its exit code, and what it has told."""
    log, run_dir = folder / "log", folder / "run"
    flags = ["--max-restarts", "100000"]
    memory = ["--memory"] if way == "compared" else []
    job = [str(HERE / "flips_job.py"), "--records", str(folder), *memory, *arguments]
    with started([*launcher("resilient-run", ranks, run_dir), *flags, *job], log, ENVIRON.get(way)) as process:
        try:
            finish(process, log, limit_s)
        except BenchmarkError:
            if process.poll() is None:
                raise
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return process.returncode, events


def reference(folder: Path, ranks: int) -> Path:
    steps = FIRST + GAP * A_JOB
    folder.mkdir()
    code, _ = run(folder, "", ["--steps", str(steps)], ranks, 600)
    if code:
        raise BenchmarkError(f"the undisturbed job ended with {code}\n{log_tail(folder / 'log')}")
    return folder / "reference.json"


def campaign(way: str, flips: list[Flip], undisturbed: Path, top: Path, ranks: int) -> Iterator[Ended]:
    """Jobs until each has hit."""
    number = 0
    while flips:
        folder = top / f"{way}{number}".replace(" ", "_")
        folder.mkdir()
        ended = [*_job(folder, way, flips[:A_JOB], undisturbed, ranks)]
        if not ended:
            raise BenchmarkError(f"nothing was flipped\n{log_tail(folder / 'log')}")
        yield from ended
        flips, number = flips[len(ended) :], number + 1


def _job(folder: Path, way: str, flips: Sequence[Flip], undisturbed: Path, ranks: int) -> Iterator[Ended]:
    plan = {FIRST + GAP * index: flip for index, flip in enumerate(flips)}
    (folder / "plan.json").write_text(json.dumps({step: flip.clause(step, 0) for step, flip in plan.items()}))
    arguments = ["--flips", str(folder / "plan.json"), "--reference", str(undisturbed), "--look", str(LOOK)]
    steps = FIRST + GAP * len(flips)
    code, events = run(folder, way, [*arguments, "--steps", str(steps)], ranks, 60 + 10 * len(flips))
    expected = json.loads(undisturbed.read_text())
    held = [_last(folder / f"rank{rank}.jsonl") for rank in range(ranks)]
    marks = [index for index, event in enumerate(events) if event["kind"] == "flipped"]
    for (step, flip), begin, end in zip(plan.items(), marks, [*marks[1:], len(events)], strict=False):
        seen = [event for event in events[begin:end] if event["kind"] in FINDS]
        looked = step + LOOK
        if any(looked not in each for each in held):
            yield Ended(flip, "wrong", f"the job ended with {code}", place_of(flip.mask))
            return
        right = all(each[looked] == expected[looked] for each in held)
        yield Ended(flip, _column(flip, seen, right=right), " ".join(_kinds(seen)), place_of(flip.mask))
        if not right:
            return


def _kinds(events: Iterable[dict[str, Any]]) -> list[str]:
    return [*dict.fromkeys(event["kind"] for event in events)]


def _column(flip: Flip, seen: list[dict[str, Any]], *, right: bool) -> str:
    named = {rank for event in seen if event["kind"] == "deviates" for rank in event["detail"]["ranks"]}
    if not right:
        return "wrong" if seen else "healed"
    if named - {flip.rank}:
        return "wrong"
    return "found" if seen else "masked"


def _last(path: Path) -> dict[int, str]:
    """Step -> what the rank held behind it when it ran last."""
    return dict(map(json.loads, path.read_text().splitlines()))


def clean(way: str, variant: str, steps: int, top: Path, ranks: int) -> tuple[str, ...]:
    folder = top / f"clean_{way}_{variant}".replace(" ", "_")
    folder.mkdir()
    code, events = run(folder, way, ["--steps", str(steps), *CLEAN[variant]], ranks, 60 + steps)
    false = collections.Counter(event["kind"] for event in events if event["kind"] in FINDS)
    told = ", ".join(f"{count} {kind}" for kind, count in false.items()) or "nothing"
    return way, variant or "plain", str(steps), told, str(code)


def table(title: str, ended: Sequence[Ended], key: str) -> Table:
    columns = ("found", "masked", "healed", "wrong")
    rows = []
    groups: dict[str, collections.Counter[str]] = {}
    for each in ended:
        name = each.what if key == "bits" else f"{each.flip.kind[0]}, {each.flip.kind[1]} {each.flip.kind[2]}"
        groups.setdefault(name, collections.Counter())[each.column] += 1
    for name, counts in groups.items():
        rows.append((name, str(counts.total()), *(str(counts[column]) for column in columns)))
    return Table(title, (key, "flips", *columns), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a few, to see that it runs")
    asked = parser.parse_args()
    flips = draw(16 if asked.quick else asked.flips, asked.seed, asked.ranks)
    found: dict[str, list[Ended]] = {}
    with tempfile.TemporaryDirectory(prefix="rt-flips-") as name:
        top = Path(name)
        undisturbed = reference(top / "undisturbed", asked.ranks)
        for way, kinds in (("compared", COMPARED), ("computed twice", COMPUTED_TWICE)):
            mine = [flip for flip in flips if flip.kind in kinds]
            found[way] = [*campaign(way, mine, undisturbed, top, asked.ranks)]
            for key in ("what", "bits"):
                show(table(f"{way}, {asked.ranks} ranks, seed {asked.seed}", found[way], key))
            for each in found[way]:
                if each.column == "wrong":
                    print(f"wrong: {each.flip.clause(0, 0)}: {each.how}")
        if asked.clean:
            rows = [clean(way, variant, asked.clean, top, asked.ranks) for way in ENVIRON for variant in CLEAN]
            show(Table("without a flip", ("way", "job", "steps", "found", "exit code"), rows))
    write_json(asked.json, {way: [[*each.flip, *each[1:]] for each in ended] for way, ended in found.items()})


if __name__ == "__main__":
    main()
