"""Our own callback for ``Model.train``: saved, resumed, and at the end the bits of the run that nothing has disturbed.

Where a story needs a process that dies or hangs, it is ``saved_job.py``; the others run here, which spares the import.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore")

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import mindspore as ms
import numpy as np
import saved_job
from mindspore import nn
from saved_job import BATCHES, EPOCHS, Plan, train

from resilient_train.errors import CheckpointError, ConfigError, LayoutError, UsageError
from resilient_train.integrations.mindspore import FaultTolerance, ttp_directory

MODES = ("PYNATIVE", "GRAPH")
LAST = EPOCHS * BATCHES


class Job:
    """All ranks of one life of a job."""

    def __init__(self, folder: Path, world_size: int = 1, **plan: Any) -> None:
        self.folder, self.processes = folder, []
        for rank in range(world_size):
            given = json.dumps({"folder": str(folder), "rank": rank, "world_size": world_size, **plan})
            with self.log(rank).open("ab") as log:
                command = [sys.executable, str(HERE / "saved_job.py"), given]
                started = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "GLOG_v": "3"})
                self.processes.append(started)

    def log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def wait(self) -> list[int]:
        return [process.wait(timeout=100) for process in self.processes]

    def wait_for(self, text: str, rank: int = 0) -> None:
        deadline = time.monotonic() + 60
        while text not in self.log(rank).read_text():
            assert time.monotonic() < deadline, self.explain()
            assert self.processes[rank].poll() is None, self.explain()
            time.sleep(0.01)

    def explain(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def ends(self) -> list[str]:
        return [(self.folder / f"end{rank}").read_text() for rank in range(len(self.processes))]


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def start(*args: Any, **plan: Any) -> Job:
        made.append(Job(*args, **plan))
        return made[-1]

    yield start
    for process in (process for each in made for process in each.processes):
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    ms.dataset.config.set_fast_recovery(True)


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(mode: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    ms.dataset.config.set_fast_recovery(True)
    return train(Plan(str(tmp_path_factory.mktemp("undisturbed")), mode))


@pytest.fixture(scope="module")
def undisturbed_two(mode: str, run: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    job = run(tmp_path_factory.mktemp("undisturbed"), 2, mode=mode)
    assert job.wait() == [0, 0], job.explain()
    assert len(set(job.ends())) == 1
    return job.ends()


def saved(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("ttp*/**/*") if path.is_file())


def begin_again(folder: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Where the next life begins, and its end."""
    capsys.readouterr()
    ms.dataset.config.set_fast_recovery(True)
    end = train(Plan(str(folder), mode))
    return int(capsys.readouterr().out.split("start ")[1].split()[0]), end


def test_sigterm_in_the_middle_of_an_epoch(tmp_path: Path, run: Callable[..., Job], mode: str, undisturbed: str) -> None:
    """From outside; and a second one while it saves."""
    job = run(tmp_path, mode=mode, faults={"term: read": [0, 0], "term behind": [0, 8]})
    assert job.wait() == [128 + signal.SIGTERM], job.explain()
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_9/rank_0/ttp_rank_0-2_3.ckpt"]
    job = run(tmp_path, mode=mode, life=1)
    assert job.wait() == [0], job.explain()
    assert "start 9\n" in job.log(0).read_text()
    assert job.ends() == [undisturbed]


@pytest.mark.parametrize("groups", [None, [[0, 1]]], ids=["each rank saves", "one of two replicas saves"])
def test_two_ranks_of_which_one_is_told(
    tmp_path: Path, run: Callable[..., Job], mode: str, undisturbed_two: list[str], groups: Any
) -> None:
    """They stop behind the same step, and nobody is left alone in a collective."""
    job = run(tmp_path, 2, mode=mode, groups=groups, faults={"term before": [1, 8]})
    assert job.wait() == [75, 128 + signal.SIGTERM], job.explain()
    files = [f"ttp_saved_checkpoints-step_9/rank_{each}/ttp_rank_{each}-2_3.ckpt" for each in range(2)]
    assert saved(tmp_path) == (files[:1] if groups else files)
    job = run(tmp_path, 2, mode=mode, groups=groups, life=1)
    assert job.wait() == [0, 0], job.explain()
    assert job.ends() == undisturbed_two


def test_two_ranks_of_which_one_fails(tmp_path: Path, run: Callable[..., Job]) -> None:
    """It is not the one that saves when all stop; but its replica may be gone, so it saves by itself."""
    job = run(tmp_path, 2, groups=[[0, 1]], faults={"raise before": [1, 8]})
    assert job.processes[1].wait(timeout=60) == 1
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_8/rank_1/ttp_rank_1-2_2.ckpt"], job.explain()
    job.processes[0].kill()
    job = run(tmp_path, 2, groups=[[0, 1]], life=1)
    assert job.wait() == [0, 0], job.explain()
    assert all("start 8\n" in job.log(rank).read_text() for rank in range(2))


@pytest.mark.parametrize("point", ["half", "read", "publish"])
def test_killed_while_it_saves(
    tmp_path: Path, run: Callable[..., Job], capsys: pytest.CaptureFixture[str], point: str, undisturbed: str, mode: str
) -> None:
    """What is half done is not taken, does not stand in the way, and is not mixed with what comes later."""
    job = run(tmp_path, mode=mode, faults={f"kill: {point}": [0, 0], "term before": [0, 8]})
    assert job.wait() == [-signal.SIGKILL], job.explain()
    assert not ttp_directory.complete(tmp_path)
    with pytest.raises(SystemExit):
        train(Plan(str(tmp_path), mode, faults={"usr1 before": [0, 8]}))
    assert "start 0" in capsys.readouterr().out
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_8/rank_0/ttp_rank_0-2_2.ckpt"]
    assert begin_again(tmp_path, mode, capsys) == (8, undisturbed)


def test_one_of_two_is_killed_while_it_saves(tmp_path: Path, run: Callable[..., Job]) -> None:
    """Half of the state is no checkpoint, whoever has written it."""
    job = run(tmp_path, 2, faults={"kill: read": [0, 0], "term before": [0, 8]})
    assert job.processes[0].wait(timeout=60) == -signal.SIGKILL
    job.wait_for("part of step 9 is saved", rank=1)
    job.processes[1].kill()
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_9_tmp/rank_1/ttp_rank_1-2_3.ckpt"]
    job = run(tmp_path, 2, life=1)
    assert job.wait() == [0, 0], job.explain()
    assert all("start 0\n" in job.log(rank).read_text() for rank in range(2))
    assert not saved(tmp_path)


def test_a_step_that_never_ends(
    tmp_path: Path, run: Callable[..., Job], capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """It hangs in native code, where no handler of Python's can run: a copy in host memory is saved."""
    options = {"snapshot_every": 3, "step_grace_s": 0.2}
    os.environ["RESILIENT_EXIT_GRACE_S"] = "1.5"
    try:
        job = run(tmp_path, mode=mode, faults={"hang": [0, 8]}, options=options)
    finally:
        del os.environ["RESILIENT_EXIT_GRACE_S"]
    job.wait_for("hangs")
    job.processes[0].send_signal(signal.SIGTERM)
    assert job.wait() == [75], job.explain()
    assert saved(tmp_path)[-1] == "ttp_saved_checkpoints-step_6/rank_0/ttp_rank_0-1_6.ckpt"
    assert begin_again(tmp_path, mode, capsys)[0] == 6


@pytest.mark.parametrize(
    ("fault", "step"),
    [("begin", 7), ("raise before", 8), ("raise behind", 8), ("raise behind", LAST), ("in the step", 9)],
)
def test_an_error_of_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, step: int, undisturbed: str, mode: str
) -> None:
    """Of callbacks before and behind ours, and in a step whose optimizer has not begun to write."""
    with pytest.raises((ValueError, RuntimeError), match=r"step|callback"):
        train(Plan(str(tmp_path), mode, faults={fault: [0, step]}))
    behind = step - 1 if fault in ("begin", "in the step") else step
    assert [each for each, _ in ttp_directory.complete(tmp_path)] == [behind]
    start, end = begin_again(tmp_path, mode, capsys)
    assert start == behind
    assert end == undisturbed
