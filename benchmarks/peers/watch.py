"""A running job as the benchmark sees it, from outside: through the journals of its ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from common import HERE, BenchmarkError, log_tail, started
from recovery import POLL_S, Follower

from peers.systems import Launch, System, Trial
from resilient_train.observe.sinks import EVENTS_FILE

_TOKEN = "PEERS_TRIAL"  # noqa: S105 -- the name of an environment variable


class Commit(NamedTuple):
    """A rank has applied the update of this step."""

    step: int
    time_ns: int
    pid: int


class Mark(NamedTuple):
    """A process has come to a place on the way to its first step."""

    name: str
    time_ns: int
    pid: int


class Slot:
    """What one rank's processes have written, one after the other."""

    def __init__(self, journal: Path) -> None:
        self._follower = Follower(journal)
        self.commits: list[Commit] = []
        self.marks: list[Mark] = []
        self.digests: dict[int, int] = {}
        self.pid: int | None = None

    def update(self) -> None:
        for line in self._follower.news():
            if "step" in line:
                self.commits.append(Commit(**line))
            elif "mark" in line:
                self.marks.append(Mark(line["mark"], line["time_ns"], line["pid"]))
                self.pid = line["pid"]
            else:
                self.digests[line["after"]] = line["digest"]

    def highest(self) -> int:
        return max((each.step for each in self.commits), default=-1)

    def alive(self) -> bool:
        """The process that wrote last is there, and neither a zombie nor stopped."""
        if self.pid is None:
            return False
        try:
            status = psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return False
        return status not in {psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED}


class Job:
    """The processes of a trial, and what is known of their steps."""

    def __init__(self, system: System, trial: Trial, processes: list[tuple[Launch, subprocess.Popen[bytes]]]) -> None:
        self._processes = processes
        self._trial = trial
        self._deadline = time.monotonic() + trial.limit_s
        self.ranks = trial.ranks
        self.slots = [Slot(trial.folder / f"journal{slot}.jsonl") for slot in range(trial.ranks + system.spares)]
        self._events = Follower(trial.folder / "run" / EVENTS_FILE)
        self.standby_ready = False

    def update(self) -> None:
        for slot in self.slots:
            slot.update()
        for event in self._events.news():
            self.standby_ready = self.standby_ready or event["kind"] == "standby_ready"

    def over(self) -> bool:
        """Nobody trains any more."""
        return all(process.poll() is not None for launch, process in self._processes if not launch.serves)

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        """Until ``reached``. Raises BenchmarkError if the job ends before, or the trial's time is up."""
        if not self.wait_for(reached, self._deadline - time.monotonic()):
            state = "ended before" if self.over() else "did not come in time to"
            logs = "\n".join(f"--- {each.name}\n{log_tail(each)}" for each in sorted(self._trial.folder.glob("*.log")))
            raise BenchmarkError(f"the job {state}: {what}\n{logs}")

    def wait_for(self, reached: Callable[[], bool], limit_s: float) -> bool:
        """Whether this came about in that time."""
        end = min(time.monotonic() + limit_s, self._deadline)
        while True:
            self.update()
            if reached():
                return True
            if time.monotonic() > end or self.over():
                return False
            time.sleep(POLL_S)

    def fault(self, slot: int, number: int) -> int:
        """Sends the signal to the rank's process; returns when that was."""
        pid = self.slots[slot].pid
        assert pid is not None, "a fault is for a rank that has trained"
        time_ns = time.time_ns()
        os.kill(pid, number)
        return time_ns

    def logs(self) -> list[Path]:
        return sorted(self._trial.folder.glob("*.log"))


@contextlib.contextmanager
def running(system: System, trial: Trial) -> Iterator[Job]:
    """The job of a trial; at the end of the block nothing of it is left."""
    trial.folder.mkdir(parents=True)
    token = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        stack.callback(_end_strays, token)
        processes = []
        for index, launch in enumerate(system.launches(trial)):
            environ = {**launch.environ, "PYTHONPATH": str(HERE), _TOKEN: token}
            process = stack.enter_context(started(launch.command, trial.folder / f"{index}.log", environ))
            processes.append((launch, process))
        # Asked to end all at once, and not one after the other with a time of grace for each.
        stack.callback(_terminate, [process for _, process in processes])
        yield Job(system, trial, processes)


def _terminate(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


def _end_strays(token: str) -> None:
    """Kills what has left the process groups of its job, as daemons do: known by the environment that we gave it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(_TOKEN) == token:
                process.kill()


def sample(commits: list[Commit]) -> dict[str, Any]:
    """Steps without a fault: the mean has all in it that happens between steps, such as checkpoints."""
    gaps = sorted((b.time_ns - a.time_ns) / 1e6 for a, b in itertools.pairwise(commits))
    mean = (commits[-1].time_ns - commits[0].time_ns) / 1e6 / len(gaps)
    return {"steps": len(gaps), "mean_ms": round(mean, 4), "median_ms": round(gaps[len(gaps) // 2], 4)}
