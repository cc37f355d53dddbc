"""Every kind of fault at every place of a step, and what became of it: writes the table ``docs/matrix.md``.

One run for each kind and number of ranks, with a fault in every tenth step; the job is that of the process tests. The
rows of a run whose end is not that of the undisturbed one, bit for bit, say so, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import about

from resilient_train.faults import COST_NO_PROCESS, PLACES, RECOVERY_PHASES, TARGETS, UCE_PLACES, Injection
from resilient_train.testing import drill

JOB = Path(__file__).parent.parent / "tests" / "process" / "jobs" / "train.py"
WORLDS = (2, 4)
HANG_TIMEOUT_S = 2
NAMES = {
    "kill": "process killed (SIGKILL)",
    "stop": "process stopped (SIGSTOP)",
    "loop": "endless loop that holds the GIL",
    "hcce": "collectives of a rank broken",
    **{f"uce {target}": f"device memory: {target}" for target in TARGETS},
}
_LIMIT_S = 300.0
_EVERY = {"stop": 200}
"""Steps from one fault to the next where it is not 10: these take half a second, in which the hang watch times some."""
Cell = tuple[str, float]
"""Strategy and milliseconds."""


def places_of(kind: str) -> list[tuple[str, str]]:
    """The places of a step at which a fault of this kind can be."""
    if kind.startswith("uce"):
        return list(UCE_PLACES)
    every = [(phase, at) for phase, places in PLACES.items() if phase not in RECOVERY_PHASES for at in places]
    every.remove(("COMPUTE", "end"))  # of a body that makes no update; the job has none
    return every


def plan_of(kind: str, ranks: int) -> Iterator[Injection]:
    """One fault of the kind at each of its places, going round the ranks."""
    name, _, target = kind.partition(" ")
    incarnations = [0] * ranks
    for number, ((phase, at), rank) in enumerate(zip(places_of(kind), itertools.cycle(range(ranks)), strict=False)):
        step = _EVERY.get(name, 10) * (number + 1)
        yield Injection(name, rank, phase, at, step=step, incarnation=incarnations[rank], target=target)
        incarnations[rank] += name not in COST_NO_PROCESS


def run_kind(kind: str, ranks: int, folder: Path) -> dict[tuple[str, str], Cell]:
    """Place -> what became of the fault there."""
    clauses = list(plan_of(kind, ranks))
    steps = clauses[-1].step + 3
    # What --faults would refuse in an undisturbed run, a drill would as well: it is the same launcher.
    options = drill.DrillOptions(command=(str(JOB), "--steps", str(steps)), run_dir=folder, ranks=ranks)
    _, expected, _ = drill.run_once(options, "undisturbed", "", _LIMIT_S)
    text = "; ".join(clause.describe() for clause in clauses)
    code, story, events = drill.run_once(options, "disturbed", text, _LIMIT_S)
    same = code == 0 and story.digest is not None and story.digest == expected.digest
    cells = {}
    for clause in clauses:
        blow = drill.outcome_of(clause, events, story.recoveries)
        strategy = blow.strategy if same else f"{blow.strategy or 'nothing'}, NOT IDENTICAL"
        cells[clause.phase, clause.at] = (strategy, blow.recovery_ms or 0.0)
    return cells


def rows(results: dict[tuple[str, int], dict[tuple[str, str], Cell]]) -> Iterator[str]:
    """The table, line by line."""
    yield "| fault | place in the step | recovered by | " + " | ".join(f"{ranks} ranks, ms" for ranks in WORLDS) + " |"
    yield "|---|---|---|" + "---|" * len(WORLDS)
    for kind, name in NAMES.items():
        for phase, at in places_of(kind):
            cells = [results[kind, ranks][phase, at] for ranks in WORLDS]
            how = " / ".join(dict.fromkeys(strategy for strategy, _ in cells))
            times = " | ".join(f"{ms:.0f}" for _, ms in cells)
            yield f"| {name} | {phase} {at} | {how} | {times} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=JOB.parents[3] / "docs" / "matrix.md")
    out = parser.parse_args().out
    os.environ |= {"RESILIENT_HANG_TIMEOUT_S": str(HANG_TIMEOUT_S), "OMP_NUM_THREADS": "1"}
    results = {}
    with tempfile.TemporaryDirectory(prefix="rt-matrix-") as folder:
        for kind, ranks in itertools.product(NAMES, WORLDS):
            print(f"{kind}, {ranks} ranks ...", flush=True)
            results[kind, ranks] = run_kind(kind, ranks, Path(folder) / f"{kind.replace(' ', '-')}-{ranks}")
    machine = about()
    head = (
        "# Every fault at every place\n\n"
        f"Written by `benchmarks/matrix.py` on {machine['time'][:10]} at commit {machine['commit']}, on "
        f"{machine['cpus']} cores, one fault each. Milliseconds from the injection until all ranks train again. "
        "Everything is at its defaults, so a new process is [a fork](how-to/standbys.md), but for "
        f"`RESILIENT_HANG_TIMEOUT_S={HANG_TIMEOUT_S}` instead of [at least a minute](how-to/hangs.md#when): that is "
        "what an endless loop waits for. A stopped process is found by what a usual step takes, and after 2 s where no "
        "steps have been timed yet, which this table leaves out. A broken collective waits for a second, in which a "
        "death would explain it. Unless a row says otherwise the run ended with the parameters and the optimizer state "
        "of the undisturbed one, bit for bit.\n\n"
    )
    table = list(rows(results))
    out.write_text(head + "\n".join(table) + "\n")
    print("\n".join(table))
    bad = any("NOT" in strategy or not ms for cells in results.values() for strategy, ms in cells.values())
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
