"""A job as a child process that never outlives its parent's interest in it (demonstration, drills, benchmarks)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from resilient_train.config import environ_copy
from resilient_train.errors import ConfigError

LAUNCHER_LOG = "launcher.log"
"""What ``resilient-run`` and the ranks say, beside ``events.jsonl``."""

_LAUNCH = "from resilient_train.launch.start import main; main()"
_TERM_GRACE_S = 8.0
_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SWITCHES = ("RESILIENT_", "MS_")
_LOG_TAIL_LINES = 12


def new_run_dir(kind: str) -> Path:
    """A directory name, ``kind`` in it, that no other run of this machine has now."""
    return Path("resilient_runs", f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def check_unused(run_dir: Path) -> None:
    """Raises ConfigError if there is something in ``run_dir`` already."""
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        raise ConfigError(f"--run-dir {run_dir}: exists, and is not an empty directory")


def log_tail(log: Path) -> str:
    """The last lines of a log, indented; empty if there is none."""
    lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:] if log.exists() else []
    return "\n".join(f"  {line}" for line in lines)


def clean_environ(*, switches: bool = False) -> dict[str, str]:
    """The environment without what a launcher had set in it, and, unless ``switches``, without the user's switches."""
    return {
        name: value
        for name, value in environ_copy().items()
        if name not in _INHERITED and (switches or not name.startswith(_SWITCHES))
    }


@contextlib.contextmanager
def launched(
    run_dir: Path, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """``resilient-run --run-dir RUN_DIR ARGUMENTS`` as a child, see ``running``. Its log is ``LAUNCHER_LOG``."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    run_dir.mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, "-c", _LAUNCH, "--run-dir", str(run_dir), *arguments]
    with running(command, run_dir / LAUNCHER_LOG, clean_environ() if environ is None else environ) as process:
        yield process


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; at the end of the block, whatever ends it, nothing of it is left running.

    SIGTERM ends the block like Ctrl-C does. Raises OSError if the process can't be started.
    """
    with log.open("wb") as stream, sigterm_unwinds(), contextlib.ExitStack() as stack:
        with _postponed_signals():
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )
            stack.callback(_end, process)
        yield process


@contextlib.contextmanager
def _postponed_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C wait until the block is over: a process that has just been started is known to nobody.

    By handlers, which a new program does not inherit: a mask it would.
    """
    heard: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: each for number, each in before.items() if callable(each)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _frame: heard.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if heard:
            signal.raise_signal(heard[0])


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends the block with SystemExit, so that what it holds is given back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the agent to end its ranks; what is still there after the grace time is killed, group by group.

    It is reaped last: until then the number of its group is nobody else's.
    """
    if process.returncode is not None:
        return
    # Looked up before the agent dies: afterwards its ranks are nobody's children.
    family = psutil.Process(process.pid).children(recursive=True)
    _signal_group(process.pid, signal.SIGTERM)
    _wait_unreaped(process.pid, _TERM_GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for storage that is gone
        process.wait(_TERM_GRACE_S)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def _wait_unreaped(pid: int, limit_s: float) -> None:
    """Until a child has ended."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(limit_s * 1000)
    finally:
        os.close(pidfd)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or all that is left of it has
        os.killpg(group, number)
