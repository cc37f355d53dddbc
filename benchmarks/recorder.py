"""torch's flight recorder: what it sees of gloo, what recording costs, and what it takes to ask it.

``python benchmarks/recorder.py [--quick] [--json FILE]``: a process with a gloo group of its own for each size of the
recorder's buffer (``TORCH_FR_BUFFER_SIZE``; 2,000 is torch's default).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import Table, finish, show, started, write_json

SIZES = ("default", "0", "20000")
CALLS, QUICK_CALLS = 4000, 200
ROUNDS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--job", type=int, default=0, help="for the benchmark's own use")
    asked = parser.parse_args()
    if asked.job:
        job(asked.job)
        return
    found = {size: _run(size, QUICK_CALLS if asked.quick else CALLS) for size in SIZES}
    rows = [
        (
            size,
            str(each["entries"]),
            " ".join(each["verbs"]) or "none",
            f"{each['call_us']:.1f} us",
            f"{each['dump_ms']:.1f} ms, {each['dump_bytes'] / 1000:.0f} kB",
            f"{each['file_ms']:.1f} ms, {each['file_bytes'] / 1000:.0f} kB",
            f"{each['gap_ms']:.0f} ms, without a dump {each['usual_gap_ms']:.0f} ms",
        )
        for size, each in found.items()
    ]
    columns = (
        "buffer",
        "entries",
        "recorded of gloo",
        "one all_reduce",
        "dump (CPU)",
        "file of it (CPU)",
        "longest GIL wait",
    )
    show(Table("torch's flight recorder, one process", columns, rows))
    write_json(asked.json, found)


def _run(size: str, calls: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rt-recorder-") as folder:
        log = Path(folder) / "log"
        more = {} if size == "default" else {"TORCH_FR_BUFFER_SIZE": size}
        with started([sys.executable, __file__, "--job", str(calls)], log, more) as process:
            finish(process, log, 120)
        found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return found


def job(calls: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace_json

    from resilient_train.frameworks.torch.communication.transports.gloo import stock_group
    from resilient_train.observe.collectives import report_of

    group = stock_group(dist.HashStore(), 0, 1, timedelta(seconds=60), "0", "generation 0")
    tensor = torch.ones(8)
    group.allgather([[tensor.clone()]], [tensor]).wait()
    group.broadcast(tensor, 0).wait()
    group.barrier().wait()
    verbs = {entry["profiling_name"] for entry in _entries(_dump_fr_trace_json())}
    took: list[float] = []
    for _ in range(calls * 5):
        begin = time.perf_counter()
        group.allreduce([tensor]).wait()
        took.append(time.perf_counter() - begin)
    dumps = [_timed(_dump_fr_trace_json) for _ in range(ROUNDS)]
    dump = dumps[-1][1]
    files = [_timed(lambda: report_of(dump, 0, 0)) for _ in range(ROUNDS)]
    print(
        json.dumps(
            {
                "entries": len(_entries(dump)),
                "verbs": sorted(verbs),
                "call_us": statistics.median(took) * 1e6,
                "dump_ms": statistics.median(each[0] for each in dumps) * 1e3,
                "dump_bytes": len(dump),
                "file_ms": statistics.median(each[0] for each in files) * 1e3,
                "file_bytes": len(files[-1][1]),
                "gap_ms": _longest_gap(_dump_fr_trace_json) * 1e3,
                "usual_gap_ms": _longest_gap(lambda: time.sleep(0.05)) * 1e3,
            }
        )
    )


def _entries(dump: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dump).get("entries", [])
    return found


def _timed(call: Any) -> tuple[float, Any]:
    """Time of this thread on a core, in seconds: others' work has no part in it."""
    begin = time.thread_time()
    result = call()
    return time.thread_time() - begin, result


def _longest_gap(call: Any) -> float:
    """For how long a thread that runs Python did not come to its turn while another one called."""
    over = threading.Event()
    ticks: list[float] = []

    def tick() -> None:
        while not over.is_set():
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.02)
    call()
    time.sleep(0.02)
    over.set()
    thread.join()
    return max(later - sooner for sooner, later in itertools.pairwise(ticks))


if __name__ == "__main__":
    main()
