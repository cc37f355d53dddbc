"""From the command to the first step, under torchrun and resilient-run: ``python benchmarks/startup.py [--json FILE]``.

The same script in turn, plain and with a Session: the time, and the processor time of all its processes until the job
of one step has ended. Also ``import resilient_train`` against the import of what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, BenchmarkError, Table, launcher, log_tail, show, started, summary, write_json

LIMIT_S = 120
_PR_SET_CHILD_SUBREAPER = 36
IMPORTS = {
    "interpreter": "",
    "its dependencies": "import msgspec, psutil, numpy, xxhash",
    "resilient_train": "import msgspec, psutil, numpy, xxhash, resilient_train",
}


def import_ms(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
    return (time.perf_counter() - begin) * 1e3


class Started(NamedTuple):
    """``first_step_s``: from the start of the launcher until the last rank has done its first step."""

    first_step_s: float
    cpu_s: float


def adopt_orphans() -> None:
    """What outlives its parent becomes our child, so that its processor time is counted."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def reap_all() -> None:
    """Waits for everybody who is left of a job, and that it is nobody."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start_once(kind: str, ranks: int, folder: Path) -> Started:
    folder.mkdir()
    log = folder / "job.log"
    before_s, begin_ns = cpu_s(), time.time_ns()
    command = [*launcher(kind, ranks, folder / "run"), str(HERE / "startup_job.py"), kind, str(folder)]
    with started(command, log) as process:
        process.wait(LIMIT_S)
    reap_all()
    # Plain gloo jobs now and then abort in their interpreter's end (std::terminate); their first step was long before.
    if not all((folder / f"rank{rank}").exists() for rank in range(ranks)):
        raise BenchmarkError(f"the job did not come to its first step\n{log_tail(log)}")
    last_ns = max(int((folder / f"rank{rank}").read_text()) for rank in range(ranks))
    return Started((last_ns - begin_ns) / 1e9, cpu_s() - before_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=20, help="of each")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "startup", "ranks": given.ranks}
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(given.starts):
        for name, code in IMPORTS.items():
            imports[name].append(import_ms(code))
    result["imports_ms"] = {name: summary(times) for name, times in imports.items()}
    adopt_orphans()
    pairs: list[tuple[Started, Started]] = []
    with tempfile.TemporaryDirectory(prefix="rt-startup-") as home:
        for number in range(given.starts):
            kinds = ["torchrun", "resilient-run"][:: 1 if number % 2 == 0 else -1]
            found = {kind: start_once(kind, given.ranks, Path(home) / f"{number}-{kind}") for kind in kinds}
            pairs.append((found["torchrun"], found["resilient-run"]))
    for name in Started._fields:
        plain, ours = ([getattr(pair[which], name) for pair in pairs] for which in (0, 1))
        ratio = [b / a for a, b in zip(plain, ours, strict=True)]
        result[name] = {"torchrun": summary(plain), "resilient-run": summary(ours), "ratio": summary(ratio)}
    more = summary([b - a for a, b in zip(imports["its dependencies"], imports["resilient_train"], strict=True)])
    result["import_more_ms"] = more
    write_json(given.json, result)
    rows = [(name, f"{times['median']:.0f}") for name, times in result["imports_ms"].items()]
    rows.append(("more than its dependencies", f"{more['median']:.0f} ({more['p25']:.0f}..{more['p75']:.0f})"))
    show(Table("python -c 'import ..', ms, median", ("imported", "ms"), rows))
    titles = (f"command -> first step of {given.ranks} ranks, s", "processor time of the whole job, s")
    for title, name in zip(titles, Started._fields, strict=True):
        rows = [
            (kind, f"{times['median']:.2f} ({times['p25']:.2f}..{times['p75']:.2f})")
            for kind, times in result[name].items()
        ]
        show(Table(f"{title}, median (quartiles)", ("launcher", "s"), rows))


if __name__ == "__main__":
    main()
