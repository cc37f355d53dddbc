"""MindSpore's own ``TrainFaultTolerance``, unmodified, under ``resilient-run``: real processes, real kills, two faults.

Needs MindSpore (`make test-mindspore`). What is bound to Ascend is replaced, see ``doubles.py``.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import recorder

pytest.importorskip("mindspore")

JOB = str(Path(__file__).parent / "job.py")
LAUNCHER = str(Path(sys.executable).parent / "resilient-run")
STEPS = 12
SWITCHES = "{TTP:1,UCE:1,HCCE:1,ARF:1}"
pytestmark = pytest.mark.timeout(300)


class Ended(NamedTuple):
    code: int
    told: str
    ends: list[str]
    """By rank, of parameters and optimizer state."""
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@contextmanager
def started(folder: Path, plan: str, ranks: int, switches: str, steps: int = STEPS) -> Iterator[subprocess.Popen[str]]:
    """Its processes die with it."""
    command = [
        LAUNCHER,
        "--worker_num",
        str(ranks),
        "--run_dir",
        str(folder / "run"),
        JOB,
        str(folder),
        str(steps),
        plan,
    ]
    environ = {**os.environ, "MS_ENABLE_TFT": switches, "GLOG_v": "3"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=folder, env=environ, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(folder: Path, plan: str = "", ranks: int = 2, switches: str = SWITCHES, steps: int = STEPS) -> Ended:
    with started(folder, plan, ranks, switches, steps) as process:
        _, told = process.communicate(timeout=200)
    ends = [path.read_text() for path in sorted(folder.glob("end*"))]
    events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    return Ended(process.returncode, told, ends, events)


GRAPH = "graph:0:0"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """By number of ranks. A step as one graph ends with the same bits."""
    found = {}
    for ranks in (2, 4):
        for plan in ("", GRAPH):
            job = run(tmp_path_factory.mktemp("undisturbed"), plan, ranks=ranks)
            assert job.code == 0, job.told
            assert len(job.ends) == ranks
            assert len({*job.ends, *found.get(ranks, [])}) == 1
            found[ranks] = job.ends
    return found


PLANS = {
    "HCCE, UCE with and without loss of state": (2, "hcce:1:3 uce:1:6 low:0:9"),
    "UCE of rank 0, in the first step of an epoch": (2, "uce:0:7"),
    "ARF of each rank": (2, "kill:1:4 kill:0:9"),
    "ARF in the second step": (2, "kill:1:2"),
    "one after the other": (2, "kill:1:4 hcce:0:6 uce:1:9"),
    "in the first step of the second epoch": (2, "kill:1:7 hcce:0:8"),
    "both at once": (2, "hcce:0:5 uce:1:5"),
    "who gives its state is killed in it": (4, "kill:1:5 gives:0:5 uce:2:9"),
    "two at once": (4, "kill:0:5 kill:3:5 hcce:1:9"),
}


MODES = pytest.mark.parametrize("mode", ["", GRAPH], ids=["PYNATIVE", "GRAPH"])


@MODES
@pytest.mark.parametrize(("ranks", "plan"), PLANS.values(), ids=PLANS)
def test_the_end_is_the_undisturbed_one(
    tmp_path: Path, undisturbed: dict[int, list[str]], ranks: int, plan: str, mode: str
) -> None:
    """Parameters and optimizer state, bit for bit; who was not killed keeps its process."""
    job = run(tmp_path, f"{plan} {mode}", ranks)
    assert job.code == 0, job.told
    assert job.ends == undisturbed[ranks], job.told
    assert len(list(tmp_path.glob("done.*"))) == len(plan.split()), f"not all faults were there: {job.told}"
    killed = [int(each.split(":")[1]) for each in plan.split() if each.startswith(("kill", "gives"))]
    assert sorted(event["rank"] for event in job.of("spawned")) == sorted([*range(ranks), *killed])


@MODES
def test_a_rank_that_hangs_is_replaced(
    tmp_path: Path, undisturbed: dict[int, list[str]], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Rank 0 is stopped; later rank 1 sits in native code in a step, which only a stop of all shows."""
    monkeypatch.setenv("RESILIENT_HANG_TIMEOUT_S", "1")
    job = run(tmp_path, f"freeze:0:4 stuck:1:8 {mode}")
    assert job.code == 0, job.told
    assert job.ends == undisturbed[2], job.told
    assert [event["rank"] for event in job.of("fenced")] == [0, 1], job.told
    assert len(job.of("together")) == 1, job.told
    assert sorted(event["rank"] for event in job.of("spawned")) == [0, 0, 1, 1], job.told
    assert "in hang" in (tmp_path / "run/stacks/rank_1.0.txt").read_text()


@MODES
@pytest.mark.parametrize(
    "plan", ["tre:0:5 tre:1:5", "hcce:1:8 tre:0:9 tre:1:9 uce:0:11", "tre:0:5 tre:1:5 kill:1:7", "tre:0:3 tre:1:3"]
)
def test_who_goes_back_by_mindspores_tre_counts_from_there(
    tmp_path: Path, undisturbed: dict[int, list[str]], plan: str, mode: str
) -> None:
    """To the second update, which MindSpore then calls 0. In the second it was repaired before, and is again."""
    job = run(tmp_path, f"tre:0:0 {plan} {mode}", switches=SWITCHES.replace("}", ",TRE:1}"))
    assert job.code == 0, job.told
    assert job.ends == undisturbed[2], job.told
    assert len(list(tmp_path.glob("done.*"))) == len(plan.split()), job.told
    assert [event["detail"]["commits"] for event in job.of("finished")] == [STEPS]


@MODES
def test_mindformers_monitor_has_a_step_run_again(tmp_path: Path, undisturbed: dict[int, list[str]], mode: str) -> None:
    """Its documented example: step 2, from 44 on; and a step whose norm is abnormal again stands. Later rank 1 dies."""
    job = run(tmp_path, f"tre:0:0 monitor:0:0 kill:1:6 {mode}", switches=SWITCHES.replace("}", ",TRE:1}"))
    assert job.code == 0, job.told
    assert job.ends == undisturbed[2], job.told
    recorded = json.loads((tmp_path / "abnormal_global_norm.json").read_text())
    assert recorded == {"2": [45.70246505737305, 45.70600128173828], "3": [44.0]}


@MODES
@pytest.mark.parametrize("flag", [True, False], ids=["with the callback's flag", "without"])
def test_a_tre_whose_load_leaves_the_compiled_on_old_memory_is_seen(tmp_path: Path, mode: str, flag: bool) -> None:
    """It would go on to the end and train nothing that anybody sees. There is a checkpoint: it was loaded."""
    plan = f"tre:0:0 tre:0:5 tre:1:5 its_own:0:{'1' if flag else '0'} {mode}"
    job = run(tmp_path, plan, switches=SWITCHES.replace("}", ",TRE:1}"))
    assert job.code == 1, job.told
    assert "has not changed the parameters that were loaded" in job.told
    assert not list(tmp_path.glob("ttp_saved_checkpoints*"))


def saved(folder: Path) -> int:
    """The step of the only end-of-life checkpoint; one rank has written it."""
    (found,) = folder.glob("ttp_saved_checkpoints*")
    step = int(found.name.removeprefix("ttp_saved_checkpoints-step_"))
    (file,) = found.glob("rank_*/ttp_rank_*.ckpt")
    assert file.stat().st_size > 1000
    return step


def test_an_error_of_the_scripts_ends_the_job_behind_a_checkpoint(tmp_path: Path) -> None:
    job = run(tmp_path, "raise:1:5", switches="{TTP:1}")
    assert job.code == 1, job.told
    assert saved(tmp_path) == 4
    assert "its state from after 4 updates is saved" in job.told


def test_who_dies_behind_mindspores_own_rename_is_stood_in_for(tmp_path: Path) -> None:
    """The handler raises when it is asked a second time: there is nothing to rename any more."""
    job = run(tmp_path, "raise:1:5 renames:0:4", switches="{TTP:1}")
    assert job.code == 1, job.told
    assert saved(tmp_path) == 4
    assert "rank 0 was lost before it answered, and rank 1 finds the checkpoint under its name" in job.told


def test_a_job_that_is_asked_to_end_saves_first(tmp_path: Path) -> None:
    with started(tmp_path, "pace:0:0", 2, SWITCHES) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "3.gradients.0").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=100)
    assert process.returncode == 143, told
    assert 3 <= saved(tmp_path) < STEPS


def asked(folder: Path, verb: str) -> dict[str, Any]:
    """What the job answers to a command."""
    tool = Path(sys.executable).with_name("resilient-train")
    told = subprocess.run(
        [tool, verb, folder / "run", "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    answer: dict[str, Any] = json.loads(told.stdout)
    return answer


@MODES
@pytest.mark.parametrize("switches", ["{TSP:1}", SWITCHES])
def test_all_stand_while_the_job_is_paused(
    tmp_path: Path, undisturbed: dict[int, list[str]], switches: str, mode: str
) -> None:
    """Behind the same update. Where lost ranks are replaced, one is killed there."""
    replaces = switches == SWITCHES
    with started(tmp_path, f"hold:0:3 marks:0:0 {mode}", 2, switches) as process, ThreadPoolExecutor() as pool:
        until((tmp_path / "done.hold.0.3").exists)
        pause = pool.submit(asked, tmp_path, "pause")
        until(lambda: has_happened(tmp_path, "pause_asked", 1))
        (tmp_path / "go").touch()
        assert pause.result()["paused"]
        stand = [(tmp_path / f"marks{rank}").read_text().splitlines() for rank in range(2)]
        assert 0 < len(stand[0]) == len(stand[1]) < STEPS
        if replaces:
            rank = next(each for each in asked(tmp_path, "status")["ranks"] if each["rank"] == 1)
            os.kill(rank["pid"], signal.SIGKILL)
            until(lambda: has_happened(tmp_path, "paused", 2))
        assert asked(tmp_path, "resume")["was"] == "PAUSED"
        _, told = process.communicate(timeout=100)
    assert process.returncode == 0, told
    assert [(tmp_path / f"end{rank}").read_text() for rank in range(2)] == undisturbed[2]
    assert has_happened(tmp_path, "spawned", 2 + replaces)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_happened(folder: Path, kind: str, times: int) -> bool:
    return (folder / "run/events.jsonl").read_text().count(f'"kind":"{kind}"') == times


def test_what_is_replayed_without_mindspore_is_what_it_says(tmp_path: Path) -> None:
    """``tests/pure/test_mindspore_calls.py`` does so."""
    jobs = recorder.record(tmp_path, lambda where, plan, switches: run(where, plan, 2, switches, recorder.STEPS))
    kept = json.loads(recorder.KEPT.read_text())
    assert recorder.of_each_thread(jobs) == recorder.of_each_thread(kept)


def test_a_controller_in_rank_0(tmp_path: Path, undisturbed: dict[int, list[str]]) -> None:
    """As MindSpore starts it where nobody else has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code = "from resilient_train.integrations.mindio import finder; finder.install(); import runpy, sys; "
    code += "del sys.argv[0]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    environ = {**os.environ, "MS_ENABLE_TFT": SWITCHES, "MS_TFT_IP": "127.0.0.1", "MS_TFT_PORT": str(port)}
    environ |= {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "GLOG_v": "3"}
    command = [sys.executable, "-c", code, JOB, str(tmp_path), str(STEPS), "hcce:0:5 uce:1:8"]
    ranks = [
        subprocess.Popen(command, env={**environ, "MS_NODE_ID": str(rank)}, cwd=tmp_path, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=100)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert [(tmp_path / f"end{rank}").read_text() for rank in range(2)] == undisturbed[2]
