"""The provider of ``mindio_ttp``: training loops that use it as MindIO's documents say, real processes, real kills."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import JOBS

RANKS = 3
STEPS = 12


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Job:
    def __init__(self, folder: Path, plan: str, ranks: int = RANKS) -> None:
        self.folder, self.plan, self.ranks = folder, plan, ranks
        self.port = free_port()
        self.hub = self._start("hub", "-1")
        assert self.hub.stdout is not None
        assert self.hub.stdout.readline() == b"listens\n"
        self.processes = {rank: self.start(rank) for rank in range(ranks)}

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        return self._start(f"rank{rank}", str(rank))

    def _start(self, name: str, rank: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        command = [sys.executable, str(JOBS / "mindio_loop.py"), rank, str(self.ranks), str(self.port)]
        return subprocess.Popen(
            [*command, str(self.folder), str(STEPS), self.plan],
            stdout=subprocess.PIPE if rank == "-1" else log,
            stderr=log,
            env={**os.environ, "MS_ENABLE_TFT": "{TTP:1,UCE:1,HCCE:1,ARF:1}"},
        )

    def wait(self, *, replace: bool) -> dict[int, int]:
        """Until all have ended; who is killed is started again. Returns exit codes."""
        deadline = time.monotonic() + 25
        while any(each.poll() is None for each in self.processes.values()):
            assert time.monotonic() < deadline, self.explain()
            for rank, process in list(self.processes.items()):
                if replace and process.poll() == -signal.SIGKILL:
                    self.processes[rank] = self.start(rank)
            time.sleep(0.02)
        return {rank: process.returncode for rank, process in self.processes.items()}

    def explain(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2500:]}" for path in sorted(self.folder.glob("*.log")))

    def ends(self) -> list[str]:
        return [(self.folder / f"end{rank}").read_text() for rank in range(self.ranks)]

    def close(self) -> None:
        for process in (self.hub, *self.processes.values()):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    made: list[Job] = []

    def make(plan: str = "", ranks: int = RANKS) -> Job:
        folder = tmp_path_factory.mktemp("job")
        made.append(Job(folder, plan, ranks))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def undisturbed(job) -> list[str]:
    run = job()
    assert run.wait(replace=False) == dict.fromkeys(range(RANKS), 0), run.explain()
    return run.ends()


PLANS = {
    "hcce": "hcce@1:5",
    "uce": "uce@1:5",
    "uce of two": "uce@0:5 uce@2:5",
    "uce low": "low@1:5",
    "kill": "kill@1:5",
    "kill rank 0": "kill@0:5",
    "kill in an update": "killu@2:6",
    "two faults": "kill@1:4 uce@2:4",
    "one after the other": "hcce@0:3 kill@2:6 uce@1:9",
    "kill in a repair": "uce@1:5 killr@0:1",
    "kill in a stop": "hcce@1:5 kills@2:1",
    "kill of who comes back": "kill@1:5 killb@1:1",
}


@pytest.mark.process
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_end_is_the_undisturbed_one(job, undisturbed: list[str], plan: str) -> None:
    run = job(plan)
    assert run.wait(replace=True) == dict.fromkeys(range(RANKS), 0), run.explain()
    assert run.ends() == undisturbed, run.explain()
    assert (run.folder / "resumed").exists(), "no fault was there"


@pytest.mark.process
def test_an_error_of_the_scripts_ends_the_job_behind_a_checkpoint(job) -> None:
    run = job("raise@1:5")
    codes = run.wait(replace=False)
    assert set(codes.values()) == {1}, run.explain()
    (saved,) = run.folder.glob("ckpt-*")
    assert saved.name == "ckpt-4", "renamed once"
    assert len(list(saved.iterdir())) == 1, "one of three replicas writes"
    assert json.loads(next(saved.iterdir()).read_text())["step"] == 4
