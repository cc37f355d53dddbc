"""MindSpore's own collectives on the CPU: nothing can be repaired in them, so all ranks start again from a copy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("mindspore")

JOB = str(Path(__file__).parent / "own_collectives_job.py")
LAUNCHER = str(Path(sys.executable).parent / "resilient-run")
RANKS, DIES_IN = 2, 8
MINDSPORES_OWN_S = 30
"""Behind so long MindSpore ends the survivor of a dead rank, with SIGTERM."""
pytestmark = pytest.mark.timeout(300)


class Life(NamedTuple):
    code: int
    told: str
    events: list[dict[str, Any]]


def start(folder: Path, *dies: int, restarts: int = 1) -> Life:
    """The job, to its end. Its run directory is a new one each time, its checkpoints are not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_dir = folder / f"run{len(list(folder.glob('run*')))}"
    flags = ("--worker_num", str(RANKS), "--master_port", str(port), "--run_dir", str(run_dir))
    environ = {**os.environ, "GLOG_v": "3", "RESILIENT_EXIT_GRACE_S": "4"}
    command = [LAUNCHER, *flags, "--max_restarts", str(restarts), JOB, str(folder), *map(str, dies)]
    job = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return Life(job.returncode, job.stdout + job.stderr, events)


def ends(folder: Path) -> list[str]:
    return [(folder / f"end{rank}").read_text() for rank in range(RANKS)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    life = start(folder)
    assert life.code == 0, life.told
    assert len(set(ends(folder))) == 1
    return ends(folder)


def checked(life: Life, folder: Path, killed: int) -> None:
    """The survivor sits in a collective that does not end. Its copy is saved before MindSpore would have ended it."""
    survivor = 1 - killed
    exits = {event["rank"]: event for event in reversed(life.events) if event["kind"] == "exited"}
    assert {rank: event["detail"]["code"] for rank, event in exits.items()} == {killed: -9, survivor: 75}
    assert (exits[survivor]["time_ns"] - exits[killed]["time_ns"]) / 1e9 < MINDSPORES_OWN_S / 2, life.told
    (saved,) = (folder / "saved").glob("ttp_saved_checkpoints-*")
    assert saved.name == f"ttp_saved_checkpoints-step_{DIES_IN - 1}"
    assert [path.name for path in saved.iterdir()] == [f"rank_{survivor}"]


@pytest.mark.parametrize("killed", range(RANKS))
def test_a_killed_rank_is_a_new_start_from_the_survivors_copy(
    tmp_path: Path, undisturbed: list[str], killed: int
) -> None:
    life = start(tmp_path, killed, DIES_IN)
    assert life.code == 0, life.told
    assert f"rank {killed} was killed by signal 9" in life.told
    assert [event["rank"] for event in life.events if event["kind"] == "restart_all"] == [killed]
    checked(life, tmp_path, killed)
    assert life.told.count(f"start {DIES_IN - 1}\n") == RANKS
    assert ends(tmp_path) == undisturbed


def test_where_nobody_is_to_start_again_the_next_job_does(tmp_path: Path, undisturbed: list[str]) -> None:
    life = start(tmp_path, 1, DIES_IN, restarts=0)
    assert life.code == 137, life.told
    assert "rank 1 was killed by signal 9, and no rank has come to a controller" in life.told
    assert "--max-restarts 0 is used up" in life.told
    checked(life, tmp_path, 1)
    life = start(tmp_path)
    assert life.code == 0, life.told
    assert life.told.count(f"start {DIES_IN - 1}\n") == RANKS
    assert ends(tmp_path) == undisturbed
