"""What a snapshot in memory costs, and a restore from one, against copying the same bytes.

``python benchmarks/snapshot.py [--gb 0.5 2] [--quick] [--json FILE]``. Ratios are medians over pairs of copies that ran
one after the other in the same process (``snapshot_job.py``). Needs about four times the image in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import HERE, BenchmarkError, Table, show, summary, write_json

from resilient_train.child_job import clean_environ, sigterm_unwinds
from resilient_train.state.vault.holder_search import find_holder

ROUNDS = 15
FRESH = 10
"""Processes, for what only happens once in each."""
_TIMEOUT_S = 200

Times = dict[str, list[float]]


def job(what: str, run_dir: Path, size_bytes: int, rounds: int) -> Times:
    """One process. Raises BenchmarkError if it fails."""
    command = [sys.executable, str(HERE / "snapshot_job.py"), what, str(run_dir), str(size_bytes), str(rounds)]
    told = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if told.returncode:
        raise BenchmarkError(f"{what} failed\n{told.stderr[-2000:]}")
    found: Times = json.loads(told.stdout)
    return found


def ratio(times: list[float], to: list[float]) -> dict[str, float | int]:
    return summary([mine / other for mine, other in zip(times, to, strict=True)])


def measure(gigabytes: float, rounds: int, fresh: int) -> dict[str, Any]:
    """All figures for one size of image."""
    size_bytes = int(gigabytes * 1e9) // 4096 * 4096
    with tempfile.TemporaryDirectory(prefix="rt-snapshot-") as folder:
        run_dir = Path(folder)
        vault, holder = asyncio.run(find_holder(run_dir, grace_s=0))
        assert holder is not None
        try:
            taken = job("take", run_dir, size_bytes, rounds)
            restored = job("restore", run_dir, size_bytes, rounds)
            firsts = [job("first", run_dir, size_bytes, 6) for _ in range(fresh)]
        finally:
            vault.finish()
            vault.close()
            holder.wait(_TIMEOUT_S)
    once = {name: [each[name][0] for each in firsts] for name in ("reserve", "prefault", "first", "first_cpu")}
    once["second"] = [each["later"][0] for each in firsts]  # the other slot's first
    for name in ("later", "later_cpu"):
        once[name] = [statistics.median(each[name][1:]) for each in firsts]
    faults = {name: summary([each[f"{name}_faults"][-1] for each in firsts]) for name in ("first", "later")}
    fastest = [min(pair) for pair in zip(taken["memcpy_2"], taken["stream_2"], strict=True)]
    return {
        "gigabytes": gigabytes,
        "ms": {name: summary(times) for name, times in {**taken, **once}.items()},
        "restore_ms": {name: summary(times) for name, times in restored.items()},
        "page_faults": faults,
        "ratios": {
            "snapshot / streaming copy, 2 threads": ratio(taken["snapshot"], taken["stream_2"]),
            "hashed / streaming copy, 2 threads": ratio(taken["hashed"], taken["stream_2"]),
            "snapshot / fastest copy": ratio(taken["snapshot"], fastest),
            "hashed / fastest copy": ratio(taken["hashed"], fastest),
            "snapshot / memcpy, 1 thread": ratio(taken["snapshot"], taken["memcpy"]),
            "hashed / memcpy, 1 thread": ratio(taken["hashed"], taken["memcpy"]),
            "first / later": ratio(once["first"], once["later"]),
            "first / later, CPU time": ratio(once["first_cpu"], once["later_cpu"]),
            "second / later": ratio(once["second"], once["later"]),
            "restore / memcpy, 1 thread": ratio(restored["restore"], restored["memcpy"]),
            "verified restore / memcpy, 1 thread": ratio(restored["verified"], restored["memcpy"]),
        },
        "samples": {**taken, **once, **{f"restore_{name}": times for name, times in restored.items()}},
    }


def tables(result: dict[str, Any]) -> list[Table]:
    size = f"{result['gigabytes']} GB"
    ratios = [(name, f"{each['median']:.2f}", f"{each['p25']:.2f} to {each['p75']:.2f}", str(each["n"]))
              for name, each in result["ratios"].items()]  # fmt: skip
    times = {**result["ms"], **{f"{name} (restore)": each for name, each in result["restore_ms"].items()}}
    rows = [(name, f"{each['median']:.2f}", f"{each['min']:.2f}", f"{each['max']:.2f}") for name, each in times.items()]
    return [
        Table(f"{size}: ratios", ("", "median", "quartiles", "n"), ratios),
        Table(f"{size}: ms", ("", "median", "min", "max"), rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rounds, fresh = (3, 2) if arguments.quick else (ROUNDS, FRESH)
    with sigterm_unwinds():
        results = [measure(gigabytes, rounds, fresh) for gigabytes in arguments.gb]
    for result in results:
        for table in tables(result):
            show(table)
    write_json(arguments.json, {"results": results})


if __name__ == "__main__":
    main()
