"""From the command to the first step, under torchrun and resilient-run: ``python benchmarks/startup.py [--json FILE]``.

The same script in turn, plain and with a Session. Also ``import resilient_train`` against the import of what it needs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import HERE, BenchmarkError, Table, launcher, log_tail, show, started, summary, write_json

LIMIT_S = 120
IMPORTS = {
    "interpreter": "",
    "its dependencies": "import msgspec, psutil, numpy, xxhash",
    "resilient_train": "import msgspec, psutil, numpy, xxhash, resilient_train",
}


def import_ms(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
    return (time.perf_counter() - begin) * 1e3


def first_step_s(kind: str, ranks: int, folder: Path) -> float:
    """Seconds from the start of the launcher until the last rank has done its first step."""
    folder.mkdir()
    log = folder / "job.log"
    begin_ns = time.time_ns()
    command = [*launcher(kind, ranks, folder / "run"), str(HERE / "startup_job.py"), kind, str(folder)]
    with started(command, log) as process:
        process.wait(LIMIT_S)
    # Plain gloo jobs now and then abort in their interpreter's end (std::terminate); their first step was long before.
    if not all((folder / f"rank{rank}").exists() for rank in range(ranks)):
        raise BenchmarkError(f"the job did not come to its first step\n{log_tail(log)}")
    return max(int((folder / f"rank{rank}").read_text()) - begin_ns for rank in range(ranks)) / 1e9


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
    pairs = []
    with tempfile.TemporaryDirectory(prefix="rt-startup-") as home:
        for number in range(given.starts):
            kinds = ["torchrun", "resilient-run"][:: 1 if number % 2 == 0 else -1]
            times = {kind: first_step_s(kind, given.ranks, Path(home) / f"{number}-{kind}") for kind in kinds}
            pairs.append((times["torchrun"], times["resilient-run"]))
    result["first_step_s"] = {
        "torchrun": summary([plain for plain, _ in pairs]),
        "resilient-run": summary([ours for _, ours in pairs]),
        "ratio": summary([ours / plain for plain, ours in pairs]),
    }
    more = summary([b - a for a, b in zip(imports["its dependencies"], imports["resilient_train"], strict=True)])
    result["import_more_ms"] = more
    write_json(given.json, result)
    rows = [(name, f"{times['median']:.0f}") for name, times in result["imports_ms"].items()]
    rows.append(("more than its dependencies", f"{more['median']:.0f} ({more['p25']:.0f}..{more['p75']:.0f})"))
    show(Table("python -c 'import ..', ms, median", ("imported", "ms"), rows))
    rows = [
        (name, f"{times['median']:.2f} ({times['p25']:.2f}..{times['p75']:.2f})")
        for name, times in result["first_step_s"].items()
    ]
    show(Table(f"command -> first step of {given.ranks} ranks, s, median (quartiles)", ("launcher", "s"), rows))


if __name__ == "__main__":
    main()
