"""Numbers of processes and of groups are used again: nobody is killed by one that may be somebody else's by now."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient_train import child_job
from resilient_train.config import Settings
from resilient_train.launch.agent.processes import RankProcess
from resilient_train.launch.fork.frames import gates
from resilient_train.launch.fork.standby_pool import Pool, Standby

LEAVES_ONE = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.exit({code})"
PATIENCE_S = 60.0


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is killed as a group from now on; its leader must not have been reaped, for then the number may be free."""
    found: list[tuple[int, int]] = []
    real = os.killpg

    def checked(group: int, number: int) -> None:
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # ChildProcessError: it is none of ours
        found.append((group, number))
        real(group, number)

    monkeypatch.setattr(os, "killpg", checked)
    return found


def leader(code: int = 0, text: str = LEAVES_ONE) -> tuple[subprocess.Popen[str], int]:
    """A process that leads a group, and what it has left there when it ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", text.format(code=code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    left = int(process.stdout.readline())
    process.stdout.close()
    return process, left


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_is_reaped_when_its_group_was_killed(killed: list[tuple[int, int]]) -> None:
    started, left = leader(code=3)
    process = RankProcess(0, 0, started, start="cold", wraps=False)
    until(lambda: process.exit_code() is not None)
    assert process.exit_code() == 3
    assert runs(left)
    process.close()
    assert killed == [(started.pid, signal.SIGKILL)]
    until(lambda: not runs(left))
    assert started.returncode == 3, "reaped"
    process.signal_group(signal.SIGKILL)
    assert len(killed) == 1, "its number may be another's"
    assert process.exit_code() == 3


def test_how_a_rank_ended() -> None:
    started, left = leader(text=LEAVES_ONE.replace("sys.exit({code})", "import time; time.sleep(600)"))
    process = RankProcess(0, 0, started, start="cold", wraps=True)
    assert process.exit_code() is None
    assert process.owns(started.pid)
    assert process.owns(left)
    assert not process.owns(os.getpid())
    process.signal(signal.SIGTERM)
    until(lambda: process.exit_code() is not None)
    assert process.exit_code() == -signal.SIGTERM
    process.close()


@pytest.mark.parametrize(
    ("status", "wraps", "code"),
    [(137, True, -signal.SIGKILL), (139, True, -signal.SIGSEGV), (143, True, 143), (3, True, 3), (137, False, 137)],
)
def test_a_wrapper_tells_how_its_rank_ended(status: int, wraps: bool, code: int) -> None:
    started, _ = leader(code=status)
    process = RankProcess(0, 0, started, start="cold", wraps=wraps)
    until(lambda: process.exit_code() is not None)
    assert process.exit_code() == code
    process.close()


def test_a_standby_is_reaped_when_its_group_was_killed(killed: list[tuple[int, int]]) -> None:
    async def story() -> None:
        pool = Pool("switched off", ("true",), Settings(), lambda *_: None)
        ours, theirs = gates()
        with theirs:
            started, left = leader()
            spare = Standby(started.pid, ours)
            pool._spares.append(spare)
            until(lambda: not runs(started.pid))
            assert pool.reap(started.pid)
            until(lambda: not runs(left))
            assert not pool.processes()
            assert not pool.reap(started.pid)
        started.poll()

    asyncio.run(story())
    assert [number for _, number in killed] == [signal.SIGKILL]


def test_a_child_job_is_reaped_when_its_group_was_killed(
    killed: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_job, "_TERM_GRACE_S", 60.0)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    text = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {deaf!r}]); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    with child_job.running([sys.executable, "-c", text], tmp_path / "log", dict(os.environ)) as process:
        until(lambda: (tmp_path / "log").read_text().count("\n") == 2)  # in whichever order both have written
        left = int((tmp_path / "log").read_text().replace("deaf", ""))
    assert killed == [(process.pid, signal.SIGTERM), (process.pid, signal.SIGKILL)]
    assert process.returncode == -signal.SIGTERM
    until(lambda: not runs(left))
