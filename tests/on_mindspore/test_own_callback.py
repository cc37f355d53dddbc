"""What ``resilient-run`` can do with a job whose ranks have our callback, and MindSpore's own collectives: have it
stand still, and end what hangs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore")

JOB = str(Path(__file__).parent / "own_collectives_job.py")
LAUNCHER, TOOL = (str(Path(sys.executable).parent / name) for name in ("resilient-run", "resilient-train"))
RANKS = 2
pytestmark = pytest.mark.timeout(300)


class Job:
    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process, self.run_dir = folder, process, folder / "run"

    def steps(self, rank: int) -> list[int]:
        out = (self.run_dir / "logs" / f"rank_{rank}" / "0.out").read_text()
        return [int(line.split()[1]) for line in out.splitlines() if line.startswith("step ")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def asks(self, verb: str) -> dict[str, Any]:
        command = [TOOL, verb, str(self.run_dir), "--json"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        answer: dict[str, Any] = json.loads(told.stdout)
        return answer

    def ends(self) -> list[str]:
        return [(self.folder / f"end{rank}").read_text() for rank in range(RANKS)]


@contextmanager
def started(folder: Path, *arguments: str, **environ: str) -> Iterator[Job]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ("--worker_num", str(RANKS), "--master_port", str(port), "--run_dir", str(folder / "run"))
    known = {**os.environ, "GLOG_v": "3", "RESILIENT_EXIT_GRACE_S": "6", **environ}
    command = [LAUNCHER, *flags, "--max_restarts", "1", JOB, str(folder), *arguments]
    with subprocess.Popen(command, env=known, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield Job(folder, process)
        finally:
            process.terminate()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_begun(job: Job) -> bool:
    return all((job.run_dir / "ranks" / f"at_{rank}").exists() for rank in range(RANKS))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with started(tmp_path_factory.mktemp("undisturbed")) as job:
        told, _ = job.process.communicate(timeout=200)
        assert job.process.returncode == 0, told
        return job.ends()


@pytest.mark.parametrize("befalls", ["nothing", "kill", "SIGTERM"])
def test_all_stand(tmp_path: Path, undisturbed: list[str], befalls: str) -> None:
    """Behind the same step. One that is killed there: the other saves what it holds, and the job still stands. A job
    that is to end saves it, and goes on from there when it is started again.
    """
    with started(tmp_path, "slow", MS_ENABLE_TFT="{TTP:1,TSP:1,ARF:1}") as job:
        until(lambda: has_begun(job))
        assert job.asks("pause")["paused"]
        stand = [job.steps(rank) for rank in range(RANKS)]
        (paused,) = job.events("paused")
        assert stand[0] == stand[1] == [*range(1, paused["detail"]["step"] + 1)]
        time.sleep(0.3)
        assert stand == [job.steps(rank) for rank in range(RANKS)], "nobody goes on"
        status = job.asks("status")
        assert status["stage"] == "PAUSED"
        assert [rank["commits"] for rank in status["ranks"]] == [paused["detail"]["step"]] * RANKS
        if befalls == "kill":
            os.kill(status["ranks"][0]["pid"], signal.SIGKILL)
            until(lambda: len(job.events("paused")) == 2)
            assert len(job.events("restart_all")) == 1
        if befalls == "SIGTERM":
            job.process.terminate()
        else:
            assert job.asks("resume")["was"] == "PAUSED"
        told, _ = job.process.communicate(timeout=200)
    assert job.process.returncode == (143 if befalls == "SIGTERM" else 0), told
    if befalls == "SIGTERM":
        step = paused["detail"]["step"]
        assert (tmp_path / "saved" / f"ttp_saved_checkpoints-step_{step}").exists(), told
        with started(tmp_path / "again", "from", str(tmp_path)) as job:
            told, _ = job.process.communicate(timeout=200)
            assert job.process.returncode == 0, told
            assert told.count(f"start {step}\n") == RANKS
    assert job.ends() == undisturbed, told


def test_two_pauses_that_follow_each_other_at_once(tmp_path: Path, undisturbed: list[str]) -> None:
    """A rank that has not seen the first one's end must not take the second for it: the other would wait for it in a
    step.
    """
    with started(tmp_path, "slow") as job:
        until(lambda: has_begun(job))
        for _ in range(4):
            assert job.asks("pause")["paused"]
            job.asks("resume")
        told, _ = job.process.communicate(timeout=200)
    assert job.process.returncode == 0, told
    steps = [event["detail"]["step"] for event in job.events("paused")]
    assert len(steps) == 4, told
    assert steps == sorted(set(steps)), told
    assert job.ends() == undisturbed


def test_who_can_not_stand(tmp_path: Path) -> None:
    """Its switches say so, and so does the answer."""
    with started(tmp_path, "slow", MS_ENABLE_TFT="{TTP:1}") as job:
        until(lambda: (job.run_dir / "events.jsonl").exists() and len(job.events("spawned")) == RANKS)
        command = [TOOL, "pause", str(job.run_dir)]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode == 2, told
        assert "with TSP:1 or ARF:1 in MS_ENABLE_TFT only" in told.stderr
        job.process.terminate()
        job.process.communicate(timeout=100)


def test_a_rank_that_is_stopped(tmp_path: Path, undisturbed: list[str]) -> None:
    """It is killed, the other one saves its copy, and all start again from there."""
    with started(tmp_path, "slow") as job:
        until(lambda: has_begun(job) and len(job.steps(1)) > 5)
        os.kill(job.asks("status")["ranks"][1]["pid"], signal.SIGSTOP)
        told, _ = job.process.communicate(timeout=200)
    assert job.process.returncode == 0, told
    (fenced,) = job.events("fenced")
    assert fenced["rank"] == 1, told
    assert len(job.events("restart_all")) == 1
    assert job.ends() == undisturbed


def test_a_step_that_no_rank_ends(tmp_path: Path, undisturbed: list[str]) -> None:
    """Whose fault it is nobody can tell from outside: all save their copies, and start again."""
    with started(tmp_path, "hangs", "0", "8", RESILIENT_HANG_TIMEOUT_S="0.5") as job:
        told, _ = job.process.communicate(timeout=250)
    assert job.process.returncode == 0, told
    assert "the ranks hang: no end for" in told
    assert len(job.events("restart_all")) == 1, told
    assert told.count("start 7\n") == RANKS, told
    assert job.ends() == undisturbed
