"""Runs real jobs for the process tests: bounded, in process groups of their own, killed whatever happens."""

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import traced
from served import LAUNCHER, popen

JOBS = Path(__file__).parent / "jobs"


@dataclass
class Run:
    """A job that has ended."""

    run_dir: Path
    code: int
    out: str
    err: str
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def digests(self) -> dict[int, tuple[str, str]]:
        """Rank -> (digest of parameters and optimizer state, digest of the rank's own state)."""
        return {e["rank"]: (e["detail"]["params_digest"], e["detail"]["rank_digest"]) for e in self.of("session_end")}

    def ends(self) -> dict[str, str]:
        """What ``train.py`` says each rank has at its end, by code of its own."""
        return {path.name: path.read_text() for path in self.run_dir.glob("end_rank*.txt")}

    def recoveries(self) -> int:
        return len(self.of("resumed"))

    def samples(self, rank: int, *, once: bool = True) -> dict[int, list[int]]:
        """Step -> the sample numbers that the rank trained on when it committed that step. Twice is a failure."""
        found: dict[int, list[int]] = {}
        path = self.run_dir / f"samples_rank{rank}.jsonl"
        for line in path.read_text().splitlines():
            record = json.loads(line)
            assert not (once and record["step"] in found), f"rank {rank} committed step {record['step']} twice"
            found[record["step"]] = record["ids"]
        return found

    def explain(self) -> str:
        told = "\n".join(json.dumps(e) for e in self.events[-40:])
        stacks = "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self._stacks())
        return (
            f"code {self.code}\n--- stdout\n{self.out[-2000:]}\n--- stderr\n{self.err[-4000:]}\n--- events\n{told}\n"
            f"--- stacks\n{stacks}"
        )

    def _stacks(self) -> list[Path]:
        """Of ranks that were taken for hung."""
        found = sorted((self.run_dir / "stacks").glob("rank_*"))
        return [path for path in found if path.stat().st_size][:8]


Reference = Callable[..., Run]
"""``undisturbed(ranks=3, variant="base", steps=20)``: see ``conftest.py``."""


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Where a process can listen meanwhile, and nobody else is put: it is bound here already, by who does not listen.

    The kernel gives a port that was closed to the next who asks for any; with SO_REUSEADDR two may have this one.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def start(
    command: list[str], *, new: bool = False, forked: bool = False, **environ: str
) -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own; at the end nothing of it is left. See ``served.popen``.

    What its ranks do is written down, and looked at when the test is over (``traced.py``).
    """
    process = popen(command, {"RESILIENT_TRACE": "1", **environ}, new=new, forked=forked)
    try:
        yield process
    finally:
        # The ranks die with the launcher (PR_SET_PDEATHSIG), each being in a group of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        traced.remember(command, environ)


def read_events(run_dir: Path, *, torn: bool = False) -> list[dict[str, Any]]:
    """The run's events in the order of time. ``torn``: a line may be cut, its writer having been killed in it.

    One without its end is left out: of a line that crosses a page, who reads meanwhile may see the first part only.
    """
    path = run_dir / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().rpartition("\n")[0].splitlines()
    events = [json.loads(line) for line in lines if not torn or whole(line)]
    return sorted(events, key=lambda event: event["time_ns"])


def whole(line: str) -> bool:
    """Whether this is all of a line of JSON."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def launch(
    run_dir: Path,
    script: str | Path,
    *arguments: str,
    ranks: int,
    flags: tuple[str, ...] = (),
    timeout_s: float = 120,
    **environ: str,
) -> Run:
    """Runs a script of ``jobs/`` under resilient-run to its end. Fails if that takes longer than ``timeout_s``."""
    path = JOBS / script
    command = [*LAUNCHER, "--nproc-per-node", str(ranks), "--run-dir", str(run_dir), *flags, str(path), *arguments]
    return finish(command, run_dir, timeout_s, **environ)


def finish(command: list[str], run_dir: Path, timeout_s: float = 120, **environ: str) -> Run:
    """Runs the command, a job that writes to ``run_dir``, to its end. Fails if that takes longer."""
    with start(command, **environ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            run = Run(run_dir, -1, out, err, read_events(run_dir))
            raise AssertionError(f"the job did not end within {timeout_s} s\n{run.explain()}") from None
    return Run(run_dir, process.returncode, out, err, read_events(run_dir))
