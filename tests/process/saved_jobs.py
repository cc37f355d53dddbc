"""Jobs that are cut, and started again in the same run directory: what the tests of saving have in common."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from running import JOBS, LAUNCHER, Run, read_events
from watched_jobs import gone, stop, wait

RANKS, STEPS = 3, 38
"""Three, because with two no order of additions shows. At the pace of ``--pace`` these steps take ten seconds: who does
something to the job does so before it ends.
"""


def command(run_dir: Path, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    job = [str(JOBS / "train.py"), "--steps", str(STEPS), *arguments]
    return [*LAUNCHER, "--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), *flags, *job]


def wait_for(run_dir: Path, process: subprocess.Popen[str], kind: str, times: int = 1, **detail: Any) -> None:
    """Until so many such events are written."""
    deadline = time.monotonic() + 60
    while True:
        ended = process.poll() is not None  # asked first: what a job writes last may come behind the look at its events
        if sum(each["kind"] == kind and detail.items() <= each.items() for each in read_events(run_dir)) >= times:
            return
        assert time.monotonic() < deadline, f"no {kind} came"
        assert not ended, process.communicate()
        time.sleep(0.005)


def wait_for_step(run_dir: Path, step: int) -> None:
    """Until rank 0 has recorded this step."""
    path = run_dir / "samples_rank0.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") <= step:
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.002)


def pid_of(run_dir: Path, rank: int) -> int:
    """The rank's present process."""
    pids = [e["detail"]["pid"] for e in read_events(run_dir) if e["kind"] == "spawned" and e["rank"] == rank]
    return int(pids[-1])


def kill_together(launcher: subprocess.Popen[str], pids: Iterable[int]) -> None:
    """The agent stands still meanwhile: else it could replace the first from the others' memory before these die."""
    pids = list(pids)
    stop(launcher.pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait(lambda: all(map(gone, pids)), "they do not end")
    launcher.send_signal(signal.SIGCONT)


def only_storage_leaves_snapshots_out(run: Run) -> bool:
    """It is slow now and then, and what of it is still being written is not overwritten."""
    reasons = [event["detail"]["reason"] for event in run.of("save_skipped")]
    return all("still busy" in reason or "still being read" in reason for reason in reasons)
