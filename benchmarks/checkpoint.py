"""What checkpoints cost a training job, and what a restore takes: ``python benchmarks/checkpoint.py [--size 0.5 2]``.

``[--quick] [--sections take overlap ...] [--json FILE]``. Snapshots and restores by themselves come from
``snapshot.py``; the rest from one rank in a Session (``checkpoint_job.py``), a job for each section. Needs about six
times the state in memory, and three times on the disk that holds temporary files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import snapshot
from common import HERE, Table, finish, launcher, show, started, summary, write_json
from snapshot import ratio

from resilient_train.child_job import sigterm_unwinds

ROUNDS = 10
SECTIONS = ("copies", "take", "store", "share", "overlap", "restore")
THREADS = {"idle core": 1, "saturated cores": 2}
"""Of the training; the machine of the figures has two cores."""
_LIMIT_S = 400
Times = dict[str, list[float]]
Row = tuple[str, str, str]


def job(section: str, gigabytes: float, rounds: int, threads: int, batch: int) -> Times:
    """One job of one rank. Raises BenchmarkError if it fails."""
    with tempfile.TemporaryDirectory(prefix="rt-checkpoint-") as name:
        folder = Path(name)
        command = [
            *launcher("resilient", 1, folder / "run"), "--standby", "0", str(HERE / "checkpoint_job.py"), section,
            str(int(gigabytes * 1e9)), "--rounds", str(rounds), "--threads", str(threads), "--batch", str(batch),
            "--run-dir", str(folder / "run"), "--out", str(folder / "times.json"), "--limit-s", str(_LIMIT_S),
        ]  # fmt: skip
        with started(command, folder / "log", {"OMP_NUM_THREADS": str(threads)}) as process:
            finish(process, folder / "log", _LIMIT_S + 30)
        found: Times = json.loads((folder / "times.json").read_text())
        return found


def told(values: list[float], to: list[float] | None = None, unit: str = "") -> str:
    """Median with quartiles; of the ratios of pairs where there is something ``to`` compare with."""
    count = min(len(values), len(to)) if to else 0
    found = ratio(values[:count], to[:count]) if to else summary(values)
    return f"{found['median']:.3g}{unit} ({found['p25']:.3g} to {found['p75']:.3g}), n {found['n']}"


def taken(times: Times) -> list[Row]:
    middle = statistics.median(times["snapshot"])
    return [
        ("snapshot, not overlapped, digests / streaming copy", told(times["snapshot"], times["stream"]), "<= 1.35"),
        ("... / torch.save with fsync", told(times["snapshot"], times["torch_save"]), "<= 0.06"),
        ("... / what dcp.async_save blocks", told(times["snapshot"], times["dcp_async_blocks"]), "<= 0.35"),
        ("... ms", told(times["snapshot"]), ""),
        ("first of a job, with memory made / later", f"{times['first'][0] / middle:.3g}", "<= 1.3"),
        ("second of a job / later", f"{times['second'][0] / middle:.3g}", "<= 1.3"),
    ]


def stored(times: Times) -> list[Row]:
    gigabytes = times["image_bytes"][0] / 1e9
    per_gb = [each / gigabytes for each in times["flush_cpu_s"]]
    return [
        ("durable flush / torch.save with fsync", told(times["flush"], times["torch_save"]), "<= 0.4"),
        ("... ms", told(times["flush"]), ""),
        ("... CPU s per GB", told(per_gb), "<= 0.1"),
        ("torch.save, CPU s per GB", told([each / gigabytes for each in times["torch_save_cpu_s"]]), ""),
    ]


def share(times: Times, label: str) -> list[Row]:
    kept = [quiet / busy * 100 for quiet, busy in zip(times["quiet"], times["flushing"], strict=True)]
    return [(f"training keeps, beside a flush that never ends; {label}", told(kept, unit=" %"), ">= 97 %")]


def overlapped(times: Times, label: str) -> list[Row]:
    names = {"every": "every step", "tenth": "every 10 steps", "tenth_stored": "every 10 steps, written to storage"}
    rows = []
    for lane, name in names.items():
        lost = [(mine / off - 1) * 100 for mine, off in zip(times[lane], times["off"], strict=True)]
        rows.append(
            (f"throughput lost, {name}; {label}", told(lost, unit=" %"), "<= 1 %" if label == "idle core" else "")
        )
    window = times["forward_backward"][0]
    rows.append((f"forward and backward, ms; {label}", f"{window:.0f}", ""))
    return rows


def restored(times: Times) -> list[Row]:
    return [
        ("a Session's restore from memory, verified / memcpy", told(times["restore"], times["memcpy"]), "<= 3.2"),
        ("... / torch.load", told(times["restore"], times["torch_load"]), "<= 0.1"),
        ("... ms", told(times["restore"]), ""),
    ]


def copies(result: dict[str, Any]) -> list[Row]:
    aims = {
        "snapshot / streaming copy, 2 threads": "<= 1.15",
        "hashed / streaming copy, 2 threads": "<= 1.35",
        "first / later": "<= 1.3",
        "second / later": "<= 1.3",
        "restore / memcpy, 1 thread": "<= 2.2",
        "verified restore / memcpy, 1 thread": "<= 3.2",
    }
    rows = [
        (f"by itself: {name}", f"{each['median']:.3g} ({each['p25']:.3g} to {each['p75']:.3g}), n {each['n']}", aim)
        for name, aim in aims.items()
        for each in [result["ratios"][name]]
    ]
    attach = result["restore_ms"]["attach"]
    return [*rows, ("attach in a fresh process, ms", f"{attach['median']:.2f}, n {attach['n']}", "<= 1")]


def measure(section: str, gigabytes: float, rounds: int, fresh: int, batch: int) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a section, and its samples by job."""
    if section == "copies":
        result = snapshot.measure(gigabytes, rounds, fresh)
        return copies(result), {section: result}
    if section not in {"share", "overlap"}:
        times = job(section, gigabytes, rounds, 1, 1)
        return {"take": taken, "store": stored, "restore": restored}[section](times), {section: times}
    rows: list[Row] = []
    samples: dict[str, Any] = {}
    for label, threads in THREADS.items():
        times = job(section, gigabytes, rounds, threads, batch)
        rows += (share if section == "share" else overlapped)(times, label)
        samples[f"{section}, {label}"] = times
    return rows, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, nargs="+", default=[0.5, 2.0], help="GB of state")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch", type=int, default=64, help="makes forward and backward longer than the copy")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rounds, fresh = (2, 2) if arguments.quick else (arguments.rounds, snapshot.FRESH)
    results = []
    with sigterm_unwinds():
        for gigabytes in arguments.size:
            for section in arguments.sections:
                rows, samples = measure(section, gigabytes, rounds, fresh, arguments.batch)
                results.append({"gigabytes": gigabytes, "section": section, "rows": rows, "samples": samples})
                show(Table(f"{gigabytes} GB, {section}", ("", "median (quartiles)", "aim"), rows))
                write_json(arguments.json, {"results": results})  # a later section may fail


if __name__ == "__main__":
    main()
