"""The provider of ``mindio_ttp``: training loops that use it as MindIO's documents say, real processes, real kills."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from running import JOBS, Run, finish, free_port, read_events, start
from served import LAUNCHER

from resilient_train.launch.cli.tool import main
from resilient_train.observe.report import lines
from resilient_train.observe.sinks import read_events as read
from resilient_train.observe.timeline import read_run

RANKS = 3
STEPS = 12
LONG = 5000
"""At the job's pace two minutes: who asks it to end does so before that."""
SWITCHES = "{TTP:1,UCE:1,HCCE:1,ARF:1}"
LOOP = str(JOBS / "mindio_loop.py")


def run(folder: Path, plan: str = "", **environ: str) -> Run:
    """A job of the loop under ``resilient-run``; what it leaves lies in the folder."""
    return finish(command(folder, plan), folder / "run", 60, **{"MS_ENABLE_TFT": SWITCHES, **environ})


def command(folder: Path, plan: str, steps: int = STEPS) -> list[str]:
    flags = ("--worker_num", str(RANKS), "--run_dir", str(folder / "run"))
    return [*LAUNCHER, *flags, LOOP, str(folder), str(steps), plan]


def ends(folder: Path) -> list[str]:
    return [(folder / f"end{rank}").read_text() for rank in range(RANKS)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = run(folder)
    assert job.code == 0, job.explain()
    assert "done after" in job.err
    assert f"{STEPS} updates, 0 recoveries" in job.err
    return ends(folder)


PLANS = {
    "one after the other, decorated": "decorated@0:0 hcce@0:3 kill@2:6 uce@1:9",
    "of two, at once, and low": "uce@0:3 uce@2:3 kill@1:5 uce@2:5 low@1:8 kill@0:10",
    "in an update, and of who comes back": "killu@2:3 kill@1:7 killb@1:1",
    "in a stop, and in a repair": "hcce@1:4 kills@2:1 uce@1:8 killr@0:1",
}
ALONE = {
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
"""Each by itself, to tell which one is to blame."""


@pytest.mark.process
@pytest.mark.parametrize(
    "plan",
    [
        *(pytest.param(plan, id=name) for name, plan in PLANS.items()),
        *(pytest.param(plan, id=name, marks=pytest.mark.long) for name, plan in ALONE.items()),
    ],
)
def test_the_end_is_the_undisturbed_one(tmp_path: Path, undisturbed: list[str], plan: str) -> None:
    job = run(tmp_path, plan)
    assert job.code == 0, job.explain()
    assert ends(tmp_path) == undisturbed, job.explain()
    assert (tmp_path / "resumed").exists(), "no fault was there"
    faults = [each.replace("@", ".").replace(":", ".") for each in plan.split() if not each.startswith("decorated")]
    assert {f"done.{each}" for each in faults} == {path.name for path in tmp_path.glob("done.*")}, job.explain()
    killed = sorted(int(each.split(":")[0].split("@")[1]) for each in plan.split() if each.startswith("kill"))
    assert sorted(event["rank"] for event in job.of("spawned")) == sorted([*range(RANKS), *killed])
    story = [line.text for line in lines(read_run(read(job.run_dir / "events.jsonl")))]
    assert "the job finished" in story


HANGS = {
    "freeze@1:5": "its process is stopped (SIGSTOP)",
    "stucku@1:6": "it is writing update 6; the others wait for it",
    "stuck@1:6": "of a fault elsewhere",
    "hcce@0:5 freezes@1:1": "",
}
"""A rank that is stopped, one that does not come out of native code, and what is said of it in the event."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        pytest.param(plan, why, id=name, marks=[pytest.mark.long] if name == "in a step" else [])
        for name, (plan, why) in zip(
            ["stopped", "in an update", "in a step", "in a recovery"], HANGS.items(), strict=True
        )
    ],
)
def test_a_rank_that_hangs_is_replaced(tmp_path: Path, undisturbed: list[str], plan: str, why: str) -> None:
    """Its processor thread lives, and answers. Where nobody sees who it is, a stop of all tells."""
    limit = {} if "freeze" in plan else {"RESILIENT_HANG_TIMEOUT_S": "2"}
    job = run(tmp_path, plan, **limit)
    assert job.code == 0, job.explain()
    assert ends(tmp_path) == undisturbed, job.explain()
    assert sorted(event["rank"] for event in job.of("spawned")) == [0, 1, 1, 2], job.explain()
    assert [event["rank"] for event in job.of("fenced")] == [1], job.explain()
    assert len(job.of("together")) == ("stuck@" in plan), job.explain()
    if why:
        (hung,) = job.of("hung")
        assert why in hung["detail"]["why"]
        assert hung["detail"]["stacks"] == [0, 1, 2]
    if "stuck" in plan:
        (stacks,) = (tmp_path / "run/stacks").glob("rank_1.0.txt")
        assert "in hang" in stacks.read_text(), "where it hangs"
    story = [line.text for line in lines(read_run(read(job.run_dir / "events.jsonl")))]
    assert "the job finished" in story


@pytest.mark.process
def test_a_rank_that_works_is_not_taken_for_hung(tmp_path: Path, undisturbed: list[str]) -> None:
    """For more than twice the limit."""
    job = run(tmp_path, "works@1:6", RESILIENT_HANG_TIMEOUT_S="0.8")
    assert job.code == 0, job.explain()
    assert ends(tmp_path) == undisturbed
    assert not job.of("hung") + job.of("fault"), job.explain()


@pytest.mark.process
@pytest.mark.parametrize("how", ["", pytest.param("decorated@0:0 ", marks=pytest.mark.long)])
def test_an_error_of_the_scripts_ends_the_job_behind_a_checkpoint(tmp_path: Path, how: str) -> None:
    job = run(tmp_path, f"{how}raise@1:5")
    assert job.code == 1, job.explain()
    assert saved(tmp_path) == 4
    assert "its state from after 4 updates is saved" in job.err


def saved(folder: Path) -> int:
    """The step of the only checkpoint; it has one file, which holds that step."""
    (found,) = folder.glob("ckpt-*")
    (file,) = found.iterdir()
    step = int(json.loads(file.read_text())["step"])
    assert found.name == f"ckpt-{step}"
    return step


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long), (signal.SIGUSR1, 75)]
)
def test_a_job_that_is_asked_to_end_saves_first(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with start(command(tmp_path, "pace@0:0", LONG), MS_ENABLE_TFT=SWITCHES) as job:
        wait_for(tmp_path / "grad3.0")
        job.send_signal(number)
        _, err = job.communicate(timeout=60)
    assert job.returncode == code, err
    assert 3 <= saved(tmp_path) < LONG
    assert f"resilient-run got {number.name}; its state from after" in err


@pytest.mark.process
@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("stuckn@0:1", "updates is PERHAPS saved: every part of it is written"),
        pytest.param("stucks@0:1", "nothing is saved: not every part", marks=pytest.mark.long),
    ],
    ids=["named, and not told", "not written"],
)
def test_where_the_time_to_save_is_over(tmp_path: Path, plan: str, told: str) -> None:
    environ = {"MS_ENABLE_TFT": SWITCHES, "RESILIENT_EXIT_GRACE_S": "5"}
    with start(command(tmp_path, f"pace@0:0 {plan}", LONG), **environ) as job:
        wait_for(tmp_path / "grad3.0")
        job.send_signal(signal.SIGUSR1)
        _, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    assert "the time to save is over: what is left of the job is killed" in err
    (end,) = [event for event in read_events(tmp_path / "run") if event["kind"] == "job_end"]
    assert told in end["detail"]["reason"]
    assert f"the job ends: {end['detail']['reason']}" in err
    assert len(list(tmp_path.glob("ckpt-*"))) == ("PERHAPS" in told)


@pytest.mark.process
def test_an_operator_looks_stops_and_kills(tmp_path: Path, undisturbed: list[str]) -> None:
    """In a pause a rank is killed, and replaced; all come to stand again."""
    run_dir = tmp_path / "run"
    with start(command(tmp_path, "hold@0:3"), MS_ENABLE_TFT=SWITCHES) as job, ThreadPoolExecutor() as pool:
        wait_for(tmp_path / "done.hold.0.3")
        pause = pool.submit(ask, run_dir, "pause")
        until(lambda: any(event["kind"] == "pause_asked" for event in read_events(run_dir, torn=True)))
        (tmp_path / "go").touch()
        assert pause.result()["paused"]
        status = ask(run_dir, "status")
        assert status["stage"] == "PAUSED"
        steps = {rank["commits"] for rank in status["ranks"]}
        assert len(steps) == 1, "all have made the same updates"
        assert not (tmp_path / f"grad{steps.pop() + 1}.0").exists(), "and are on the way to no other"
        ask(run_dir, "inject", "kill", "--rank", "0", "--now")
        until(lambda: len([e for e in read_events(run_dir, torn=True) if e["kind"] == "paused"]) == 2)
        assert ask(run_dir, "resume")["was"] == "PAUSED"
        _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert ends(tmp_path) == undisturbed
    assert "all ranks stand" in err


def ask(run_dir: Path, name: str, *arguments: str) -> dict[str, Any]:
    """A command of resilient-train's. What it prints goes to who asked last, so one is asked at a time."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([name, str(run_dir), *arguments, "--json"])
    assert code == 0, out.getvalue()
    return json.loads(out.getvalue())


@pytest.mark.process
def test_a_signal_for_all_processes_is_one_request(tmp_path: Path) -> None:
    """As schedulers send it. The ranks leave it to the launcher."""
    with start(command(tmp_path, "pace@0:0", LONG), MS_ENABLE_TFT=SWITCHES) as job:
        wait_for(tmp_path / "grad3.0")
        for event in read_events(tmp_path / "run"):
            if event["kind"] == "spawned":
                os.kill(event["detail"]["pid"], signal.SIGTERM)
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=60)
    assert job.returncode == 143, err
    assert 3 <= saved(tmp_path) < LONG
    assert "resilient-run got SIGTERM; its state from after" in err


@pytest.mark.process
@pytest.mark.parametrize(
    ("plan", "switches", "code", "told"),
    [
        ("die@1:5", SWITCHES, 75, "killed by signal 9, and it died 5 times in a row without one committed"),
        (
            "kill@1:5",
            "{TTP:1,UCE:1,HCCE:1}",
            75,
            "rank 1 was killed by signal 9",  # and that, or the controller's word of it, comes first
        ),
        ("leave@1:5", SWITCHES, 1, "rank 1 exited with code 0 before its training was over"),
    ],
)
def test_a_rank_that_is_not_replaced_ends_the_job_behind_a_checkpoint(
    tmp_path: Path, plan: str, switches: str, code: int, told: str
) -> None:
    job = run(tmp_path, plan, MS_ENABLE_TFT=switches)
    assert job.code == code, job.explain()
    assert told in job.err
    assert ("replacing lost ranks is switched off" in job.err) == ("ARF" not in switches)
    assert saved(tmp_path) == 4


@pytest.mark.process
@pytest.mark.parametrize(
    ("plan", "told"),
    [
        pytest.param("killm@0:1", "rank 1 has failed by itself; its state", marks=pytest.mark.long),
        ("killn@0:1", "rank 0 was lost before it answered, and rank 1 finds the checkpoint under its name"),
    ],
    ids=["before it has", "behind that"],
)
def test_who_dies_as_it_names_the_checkpoint_is_stood_in_for(tmp_path: Path, plan: str, told: str) -> None:
    job = run(tmp_path, f"raise@1:5 {plan}")
    assert job.code == 1, job.explain()
    assert saved(tmp_path) == 4
    assert told in job.err
    assert "its state from after 4 updates is saved" in job.err


@pytest.mark.process
def test_a_checkpoint_that_nobody_can_answer_for_is_perhaps_saved(tmp_path: Path) -> None:
    """All die before they have named it. What a person is told to look for is there."""
    job = run(tmp_path, "raise@1:5 killm@0:1 killm@1:1 killm@2:1")
    assert job.code == 75, job.explain()
    (end,) = job.of("job_end")
    assert end["detail"]["code"] == 75
    for text in (job.err, end["detail"]["reason"]):
        assert "its state from after 4 updates is PERHAPS saved" in text
        assert "nothing is saved" not in text
    assert [path.name for path in tmp_path.glob("ckpt-*")] == ["ckpt-4_tmp"]


@pytest.mark.process
def test_who_dies_before_all_have_come_ends_the_job_at_once(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text("import os, time\nos.kill(os.getpid(), 9) if os.environ['RANK_ID'] == '1' else time.sleep(60)")
    words = [*LAUNCHER, "--worker_num=2", f"--run_dir={tmp_path / 'run'}", str(script)]
    job = finish(words, tmp_path / "run", 30, MS_ENABLE_TFT=SWITCHES)
    assert job.code == 137, job.explain()
    assert "TrainFaultTolerance does so on an Ascend device only" in job.err
    assert "rank 1 was killed by signal 9, and no rank has come to a controller that could have it replaced" in job.err


@pytest.mark.process
@pytest.mark.parametrize("asks", [True, False], ids=["asked to end", "another rank fails"])
def test_ranks_that_know_no_controller_save_by_themselves(tmp_path: Path, *, asks: bool) -> None:
    """With a callback of their own, or none."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "if os.environ['MS_ROLE'] == 'MS_SCHED':\n    signal.pause()  # else it would say that rank 0 is there\n"
        "rank, folder = os.environ['RANK_ID'], pathlib.Path(sys.argv[1])\n"
        "def save(*_):\n    time.sleep(0.3)\n    (folder / f'saved{rank}').touch()\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "(folder / f'there{rank}').touch()\n"
        "while not (folder / 'there0').exists() or not (folder / 'there1').exists():\n    time.sleep(0.01)\n"
        "time.sleep(60 if rank == '0' or len(sys.argv) == 2 else 0)\n"
        "sys.exit(3)\n"
    )
    words = [*LAUNCHER, "--worker_num=2", f"--run_dir={tmp_path / 'run'}", str(script), str(tmp_path)]
    with start([*words, *([] if asks else ["fail"])]) as job:
        wait_for(tmp_path / "there0")
        wait_for(tmp_path / "there1")
        if asks:
            job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=60)
    assert job.returncode == (143 if asks else 3), err
    assert sorted(path.name for path in tmp_path.glob("saved*")) == (["saved0", "saved1"] if asks else ["saved0"])


OF_NO_CONTROLLER = """
import os, pathlib, signal, sys, time
if os.environ["MS_ROLE"] == "MS_SCHED":
    signal.pause()
rank, folder, code = os.environ["RANK_ID"], pathlib.Path(sys.argv[1]), int(sys.argv[2])
def save(*_):
    (folder / "asked").touch()
    while len(sys.argv) > 3 and not (folder / "go").exists():
        time.sleep(0.01)
    (folder / "saved").touch()
    sys.exit(code)
if not (folder / "saved").exists():
    signal.signal(signal.SIGTERM, save)
    (folder / f"there{rank}").touch()
    while not (folder / "there0").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), 9) if rank == "1" else time.sleep(60)
"""


def of_no_controller(folder: Path, *words: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Two ranks, of which 1 dies; what the other does then is in the words."""
    script = folder / "alone.py"
    script.write_text(OF_NO_CONTROLLER)
    return [*LAUNCHER, "--worker_num=2", f"--run_dir={folder / 'run'}", *flags, str(script), str(folder), *words]


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "flags", "ends"), [(75, (), 0), (143, (), 0), (0, (), 137), (75, ("--max_restarts=0",), 137)]
)
def test_all_start_again_if_a_survivor_has_saved(tmp_path: Path, code: int, flags: tuple[str, ...], ends: int) -> None:
    job = finish(of_no_controller(tmp_path, str(code), flags=flags), tmp_path / "run", 60)
    assert job.code == ends, job.explain()
    assert "rank 1 was killed by signal 9, and no rank has come to a controller" in job.err
    assert [event["rank"] for event in job.of("restart_all")] == ([1] if ends == 0 else [])
    assert len(job.of("spawned")) == (4 if ends == 0 else 2)
    assert ("--max-restarts 0 is used up" in job.err) == bool(flags)


@pytest.mark.process
def test_who_is_asked_to_end_does_not_start_again(tmp_path: Path) -> None:
    with start(of_no_controller(tmp_path, "75", "waits")) as job:
        wait_for(tmp_path / "asked")
        job.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        _, err = job.communicate(timeout=60)
    assert job.returncode == 143, err
    assert "All ranks start again" not in err


@pytest.mark.process
def test_a_controller_in_rank_0(tmp_path: Path, undisturbed: list[str]) -> None:
    """Without ``resilient-run``, as MindSpore starts it."""
    code = "from resilient_train.integrations.mindio import finder; finder.install(); import runpy, sys; "
    code += "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    with free_port() as port:
        environ = {**os.environ, "MS_ENABLE_TFT": SWITCHES, "MS_TFT_IP": "127.0.0.1", "MS_TFT_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, LOOP, str(tmp_path), str(STEPS), "hcce@1:5 uce@2:7"],
                env={**environ, "MS_NODE_ID": str(rank), "MS_WORKER_NUM": str(RANKS)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            told = [rank.communicate(timeout=60)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(told)
    assert ends(tmp_path) == undisturbed


TASKD = str(JOBS / "mindio_taskd.py")
REPORTS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
UCE, PROCESS, NETWORK = 0, 1, 2


def decided_by_mindx(folder: Path, plan: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """A job whose controller is taskd's, and what that was called for."""
    environ = {**os.environ, "MS_ENABLE_TFT": SWITCHES, "MS_TFT_IP": "127.0.0.1", "MS_WORKER_NUM": str(RANKS)}
    words = [sys.executable, TASKD, str(folder), str(STEPS), plan]
    with free_port() as port:
        environ["MS_TFT_PORT"] = str(port)
        job = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    return job, [json.loads(line) for line in (folder / "mindx").read_text().splitlines()]


@pytest.mark.process
def test_mindx_decides_and_replaces(tmp_path: Path, undisturbed: list[str]) -> None:
    """A collective fails, and a rank dies in the stop that follows; then another rank loses memory, and is replaced."""
    job, calls = decided_by_mindx(tmp_path, "hcce@1:4 kills@2:1 uce@0:9")
    assert job.returncode == 0, job.stderr
    assert ends(tmp_path) == undisturbed
    results = [
        (code, {int(rank): kind for rank, kind in faults.items()}, way) for _, code, _, faults, way in calls[3:5]
    ]
    both = {1: NETWORK, 2: PROCESS}
    assert results == [(405, both, "retry"), (0, both, "recover")]
    assert [name for name, *_ in calls] == [*REPORTS, "report_result", *REPORTS]
    assert calls[7] == ["report_strategies", {"0": UCE}, ["exit", "dump", "recover", "retry"]]
    assert calls[8] == ["report_result", 0, "all go on behind update 8", {"0": UCE}, "recover"]


@pytest.mark.process
def test_mindx_has_a_failed_job_saved(tmp_path: Path) -> None:
    job, calls = decided_by_mindx(tmp_path, "raise@1:5")
    assert job.returncode == 1, job.stderr
    assert saved(tmp_path) == 4
    assert calls[2] == ["report_strategies", {"1": PROCESS}, ["exit", "dump"]]
    assert calls[3:] == [["report_result", 0, "rank 1 has failed by itself", {"1": PROCESS}, "dump"]]


def wait_for(path: Path) -> None:
    until(path.exists)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)
