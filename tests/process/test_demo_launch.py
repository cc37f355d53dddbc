"""The demonstration's processes: followed to their end, and never left behind. The launcher is a stand-in."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from resilient_train import child_job
from resilient_train.demo.run import DemoOptions, as_dict, compare

pytestmark = pytest.mark.process

PREAMBLE = """
import json, os, subprocess, sys, time
run = sys.argv[sys.argv.index("--run-dir") + 1]
def event(kind_, rank=-1, generation=0, **detail):
    line = {"kind": kind_, "time_ns": time.time_ns(), "rank": rank, "generation": generation, "detail": detail}
    with open(run + "/events.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
"""

TRAINS = (
    PREAMBLE
    + """
event("run_start", world_size=2)
for rank in (0, 1):
    with open(f"{run}/loss_rank{rank}.jsonl", "a") as file:
        for step in range(6):
            file.write(json.dumps({"step": step, "loss": 6.0 - step}) + "\\n")
if "--faults" in sys.argv:
    for generation in (1, 2):
        event("injected", 1, kind="kill", at="start")
        event("death_seen", 1, by="pidfd")
        event("fault", 1, generation, lost=[1], reason="rank 1 was killed by signal 9")
        event("plan", -1, generation, commits=3)
        event("resumed", -1, generation)
for rank in (0, 1):
    event("session_end", rank, params_digest="d")
print("set:", sorted(name for name in os.environ if name.startswith("RESILIENT_")))
"""
)

FAILS = "import sys; print('a reason in the log'); sys.exit(3)"

HANGS = (
    PREAMBLE
    + """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(run + "/pids", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
)


def wait_for(what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def quiet(*_) -> None:
    pass


def test_both_runs_are_followed_and_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(child_job, "_LAUNCH", TRAINS)
    monkeypatch.setenv("RESILIENT_FAULTS", "kill rank=0 step=1")
    told = []
    options = DemoOptions(run_dir=tmp_path / "demo", steps=6, ranks=2)
    result = compare(options, lambda name, done, steps, news: told.append((name, done, steps, news)))
    assert result.problems == []
    assert as_dict(result)["identical"]
    assert next(name for name, *_ in told) == "undisturbed"
    assert told[-1][:3] == ("disturbed", 6, 6)
    assert sum(news.count("all ranks train again") for *_, news in told) == 2
    assert json.loads((tmp_path / "demo/disturbed/trace.json").read_bytes())
    # None of the user's settings.
    assert "set: []" in (tmp_path / "demo/disturbed/launcher.log").read_text()


def test_a_run_that_fails_is_told_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(child_job, "_LAUNCH", FAILS)
    result = compare(DemoOptions(run_dir=tmp_path, steps=6, ranks=2), quiet)
    assert not result.good
    assert "undisturbed run ended with exit code 3" in result.problems[0]
    assert "a reason in the log" in result.problems[0]


def test_nothing_outlives_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(child_job, "_LAUNCH", HANGS)
    monkeypatch.setattr(child_job, "_TERM_GRACE_S", 0.2)
    with child_job.launched(tmp_path, []):
        wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().count(" "))
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_for(lambda pid=pid: gone(pid))


@pytest.mark.parametrize(("number", "how"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_comes_while_a_process_is_started(number, how, tmp_path, monkeypatch):
    started, real = [], subprocess.Popen

    def start(*arguments, **options):
        started.append(real(*arguments, **options))
        os.kill(os.getpid(), number)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(how), child_job.running(["sleep", "600"], tmp_path / "log", dict(os.environ)):
        raise AssertionError("it came too late")
    assert started[0].returncode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_demonstration_and_its_processes(number, tmp_path):
    code = (
        "import sys; from resilient_train import child_job; from resilient_train.launch.cli.tool import main; "
        f"child_job._LAUNCH = {HANGS!r}; child_job._TERM_GRACE_S = 0.2; "
        f"sys.exit(main(['demo', '--run-dir', {str(tmp_path)!r}]))"
    )
    demo = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        pids = Path(tmp_path, "undisturbed", "pids")
        wait_for(lambda: pids.exists() and pids.read_text().count(" "))
        os.kill(demo.pid, number)
        _, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 128 + number
    assert "Traceback" not in err
    for pid in map(int, pids.read_text().split()):
        wait_for(lambda pid=pid: gone(pid))
