"""From a fault to the step that all ranks have ended behind it: MindSpore's own callback on our ``mindio_ttp``.

``python benchmarks/mindspore_repairs.py [--ranks 2 4] [--faults N] [--json FILE]``, with the Python of
``make test-mindspore``: one job for each mode, kind of fault and number of ranks, with that many faults in it, of one
rank after the other. The job is the tests' (``tests/on_mindspore/job.py``): stand-ins for what is bound to Ascend, sums
through files.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, BenchmarkError, Table, finish, show, started, summary, write_json

JOB = HERE.parent / "tests/on_mindspore/job.py"
MODES = {"PYNATIVE": "", "GRAPH": "graph:0:0"}
KINDS = {"hcce": "HCCE", "low": "UCE, no state lost", "uce": "UCE, state lost", "kill": "ARF (kill -9)"}
STEPS_BETWEEN = 6
EPOCHS = 2  # the job's
LIMIT_S = 600.0


class Repairs(NamedTuple):
    """Seconds. ``step_s``: a step of all ranks, between faults."""

    repair_s: list[float]
    step_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--faults", type=int, default=20, help="of each kind")
    parser.add_argument("--json")
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    for mode, kind, ranks in itertools.product(asked.modes, asked.kinds, asked.ranks):
        repairs = measure(mode, kind, ranks, asked.faults)
        of_case = {"mode": mode, "kind": kind, "ranks": ranks}
        found.append({**of_case, "step_s": repairs.step_s, "repair_s": summary(repairs.repair_s)})
        print(f"{mode}, {KINDS[kind]}, {ranks} ranks: {found[-1]['repair_s']}", flush=True)
    show(table(found))
    write_json(asked.json, {"cases": found}, [table(found)])


def table(found: list[dict[str, Any]]) -> Table:
    rows = []
    for each in found:
        took = each["repair_s"]
        cells = (f"{1000 * took[name]:.0f}" for name in ("median", "p75", "max"))
        rows.append(
            (
                each["mode"],
                KINDS[each["kind"]],
                str(each["ranks"]),
                str(took["n"]),
                *cells,
                f"{1000 * each['step_s']:.1f}",
            )
        )
    return Table(
        "Fault to the end of the step that it hit, on all ranks (ms)",
        ("mode", "fault", "ranks", "faults", "median", "p75", "max", "a step"),
        rows,
    )


def measure(mode: str, kind: str, ranks: int, faults: int) -> Repairs:
    """Raises BenchmarkError if a fault was not there, or not repaired."""
    plan = [(count % ranks, STEPS_BETWEEN * (count + 1)) for count in range(faults)]
    steps = STEPS_BETWEEN * (faults + 2)
    steps += -steps % EPOCHS
    with tempfile.TemporaryDirectory(prefix="rt-mindspore-") as name:
        folder = Path(name)
        told = " ".join([f"{kind}:{rank}:{step}" for rank, step in plan] + ["marks:0:0", MODES[mode]])
        command = [
            *(str(Path(sys.executable).parent / "resilient-run"), "--worker_num", str(ranks)),
            *("--run_dir", str(folder / "run"), str(JOB), str(folder), str(steps), told),
        ]
        environ = {"MS_ENABLE_TFT": "{TTP:1,UCE:1,HCCE:1,ARF:1}", "GLOG_v": "3"}
        with started(command, folder / "log", environ) as process:
            finish(process, folder / "log", LIMIT_S)
        ended = [_marks(folder / f"marks{rank}") for rank in range(ranks)]
        repair_s = []
        for rank, step in plan:
            mark = folder / f"done.{kind}.{rank}.{step}"
            if not mark.exists():
                raise BenchmarkError(f"no {kind} of rank {rank} in step {step}")
            fault_ns = mark.stat().st_mtime_ns
            behind_ns = max(min(time_ns for time_ns in each[step] if time_ns > fault_ns) for each in ended)
            repair_s.append((behind_ns - fault_ns) / 1e9)
        hit = {step for _, step in plan}
        calm = [step for step in range(3, steps) if not {step, step - 1} & hit]
        usual = [max(each[step][-1] - each[step - 1][-1] for each in ended) / 1e9 for step in calm]
        return Repairs(repair_s, statistics.median(usual))


def _marks(path: Path) -> dict[int, list[int]]:
    """Step -> when it was ended, in nanoseconds; more than once if it was run again."""
    found: dict[int, list[int]] = {}
    for line in path.read_text().splitlines():
        step, time_ns = map(int, line.split())
        found.setdefault(step, []).append(time_ns)
    return found


if __name__ == "__main__":
    main()
