"""MindSpore's own ``TrainFaultTolerance``, unmodified, over our ``mindio_ttp``: real processes, real kills, two faults.

Needs MindSpore (`make test-mindspore`). What is bound to Ascend is replaced, see ``doubles.py``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("mindspore")

HERE = Path(__file__).parent
RANKS, STEPS = 2, 12


class Job:
    def __init__(self, folder: Path, plan: str, switches: str) -> None:
        self.folder, self.plan, self.switches = folder, plan, switches
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.processes = {rank: self.start(rank) for rank in range(RANKS)}
        self.pids = {rank: process.pid for rank, process in self.processes.items()}

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        own = {"MS_ENABLE_TFT": self.switches, "MS_TFT_IP": "127.0.0.1", "MS_TFT_PORT": str(self.port), "GLOG_v": "3"}
        command = [sys.executable, str(HERE / "job.py"), str(rank), str(RANKS), str(self.folder), str(STEPS), self.plan]
        with (self.folder / f"rank{rank}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **own})

    def wait(self) -> list[int]:
        """Until all have ended; who is killed is started again. Returns exit codes."""
        deadline = time.monotonic() + 120
        while any(each.poll() is None for each in self.processes.values()):
            assert time.monotonic() < deadline, self.explain()
            for rank, process in self.processes.items():
                if process.poll() == -signal.SIGKILL:
                    self.processes[rank] = self.start(rank)
            time.sleep(0.02)
        return [process.returncode for process in self.processes.values()]

    def explain(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def ends(self) -> list[str]:
        return [(self.folder / f"end{rank}").read_text() for rank in range(RANKS)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(plan: str = "", switches: str = "{TTP:1,UCE:1,HCCE:1,ARF:1}") -> Job:
        made.append(Job(tmp_path_factory.mktemp("job"), plan, switches))
        return made[-1]

    yield make
    for process in (process for each in made for process in each.processes.values()):
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def undisturbed(job: Callable[..., Job]) -> list[str]:
    run = job()
    assert run.wait() == [0] * RANKS, run.explain()
    first, second = run.ends()
    assert first == second
    return [first, second]


PLANS = {
    "HCCE": "hcce:1:5",
    "UCE, state lost": "uce:1:5",
    "UCE, no state lost": "low:0:6",
    "ARF": "kill:1:5",
    "ARF in the second step": "kill:1:2",
    "UCE of the controller's rank": "uce:0:5",
    "one after the other": "kill:1:4 hcce:0:6 uce:1:9",
    "in the first step of the second epoch": "kill:1:7 hcce:0:8",
    "both at once": "hcce:0:5 uce:1:5",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_end_is_the_undisturbed_one(job: Callable[..., Job], undisturbed: list[str], plan: str) -> None:
    """Parameters and optimizer state, bit for bit; who was not killed keeps its process."""
    run = job(plan)
    assert run.wait() == [0] * RANKS, run.explain()
    assert run.ends() == undisturbed, run.explain()
    assert len(list(run.folder.glob("done.*"))) == len(plan.split()), "not all faults were there"
    killed = {int(each.split(":")[1]) for each in plan.split() if each.startswith("kill")}
    assert {rank for rank in range(RANKS) if run.processes[rank].pid != run.pids[rank]} == killed


@pytest.mark.timeout(300)
def test_an_error_of_the_scripts_ends_the_job_behind_a_checkpoint(job: Callable[..., Job]) -> None:
    run = job("raise:1:5", "{TTP:1}")
    assert run.wait() == [1] * RANKS, run.explain()
    (saved,) = run.folder.glob("ttp_saved_checkpoints*")
    assert saved.name == "ttp_saved_checkpoints-step_4"
    (file,) = saved.glob("rank_*/ttp_rank_*-1_4.ckpt")
    assert file.stat().st_size > 1000
