"""A running job that saves, seen and hit from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from running import JOBS, LAUNCHER, Run, read_events, start

from resilient_train.errors import HolderLostError
from resilient_train.launch.cli.asking import Follower
from resilient_train.observe.sinks import EVENTS_FILE
from resilient_train.state.checkpoint.manifest import parse_name
from resilient_train.state.checkpoint.verify import newest_complete, verify
from resilient_train.state.vault.client import Vault

RANKS = 3
"""With two no order of additions shows."""
STEPS = 140
"""Of the jobs; as many as those of the random kills have, so that one undisturbed run will do for all."""
PATIENCE_S = 60.0


def holder_pid(run_dir: Path) -> int:
    """0: there is none."""
    with contextlib.suppress(HolderLostError), contextlib.closing(Vault.connect(run_dir, member=False)) as vault:
        return vault.inventory().pid
    return 0


def end_holder(run_dir: Path) -> None:
    pid = holder_pid(run_dir)
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
    wait(lambda: gone(pid), "the holder did not end")


def state_of(pid: int) -> str:
    """As /proc has it; a process that nobody has reaped is in it, one that is reaped in none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def gone(pid: int) -> bool:
    """Whether the process runs no more; nobody may have reaped it."""
    return state_of(pid) in ("Z", "")


def stop(pid: int) -> None:
    """The process runs no more until SIGCONT: when this returns, and not a little later."""
    os.kill(pid, signal.SIGSTOP)
    wait(lambda: state_of(pid) == "T", f"process {pid} does not stop")


def recorded(run_dir: Path, ranks: int) -> int:
    """Updates that the rank that is ahead has recorded. It may have made one more."""
    paths = [run_dir / f"samples_rank{rank}.jsonl" for rank in range(ranks)]
    return 1 + max(json.loads(path.read_text().splitlines()[-1])["step"] for path in paths)


def wait(done: Callable[[], bool], failure: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < deadline, failure
        time.sleep(0.002)


class Job:
    """One launcher of the run, with what has been heard of it so far."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[str], follower: Follower) -> None:
        self.run_dir = run_dir
        self.process = process
        self._follower = follower
        self._heard: dict[str, list[dict[str, Any]]] = {}
        self.pids: dict[int, int] = {}

    def heard(self, kind: str) -> list[dict[str, Any]]:
        """The details of all events of this kind."""
        if (self.run_dir / EVENTS_FILE).exists():
            for event in self._follower.read():
                self._heard.setdefault(event.kind, []).append(
                    {**event.detail, "rank": event.rank, "time_ns": event.time_ns}
                )
                if event.kind == "spawned":
                    self.pids[event.rank] = int(str(event.detail["pid"]))
        return self._heard.get(kind, [])

    def await_more(self, kind: str, more: int = 1) -> None:
        """Until so many more events of this kind have come."""
        count = len(self.heard(kind)) + more
        wait(lambda: len(self.heard(kind)) >= count or not self.running(), f"no {kind} came")

    def began_again(self) -> bool:
        """Whether all ranks were started since the last time that all had to be."""
        last = max((each["time_ns"] for each in self.heard("restart_all")), default=0)
        return all(any(s["rank"] == r and s["time_ns"] > last for s in self.heard("spawned")) for r in self.pids)

    def running(self) -> bool:
        return self.process.poll() is None

    def end(self, timeout_s: float = PATIENCE_S) -> Run:
        """The job comes to its own end."""
        out, err = self.process.communicate(timeout=timeout_s)
        return Run(self.run_dir, self.process.returncode, out, err, read_events(self.run_dir, torn=True))


@contextlib.contextmanager
def job(run_dir: Path, *arguments: str, **environ: str) -> Iterator[Job]:
    """``train.py`` with three ranks under resilient-run; at the end nothing of it is left but the holder."""
    flags = ["--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), "--max-restarts", "1000"]
    events = run_dir / EVENTS_FILE
    if events.exists():  # the launcher would do so too, but when it has started
        events.rename(run_dir / f"events-before-{time.monotonic_ns()}.jsonl")
    follower = Follower(run_dir)
    with start([*LAUNCHER, *flags, str(JOBS / "train.py"), *arguments], **environ) as process:
        yield Job(run_dir, process, follower)


def steps_of(folder: Path) -> list[int]:
    """The steps of the checkpoints that lie there under a final name, whole or not."""
    names = [parse_name(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.step for name in names if name and not name.suffix)


def wrongs(folder: Path, acknowledged: list[int], keep: int = 2) -> list[str]:
    """What must not be at any instant, if checkpoints of these steps were told to be saved."""
    wrong = []
    for step in steps_of(folder):
        path = folder / f"step_{step}"
        report = verify(path)
        if not report.ok and path.exists():  # it may have been retired between the two looks
            wrong.append(f"torn: {path.name}: {report.problems}")
    whole = [step for step in steps_of(folder) if verify(folder / f"step_{step}").ok]
    if len(whole) < min(keep, len(set(acknowledged))):
        wrong.append(f"lost: of {acknowledged} there are {whole}")
    found = newest_complete(folder).report if acknowledged else None
    newest = found.manifest.step if found and found.manifest else -1
    if acknowledged and newest < max(acknowledged):
        wrong.append(f"lost: step {max(acknowledged)}; the newest is {newest}")
    return wrong
