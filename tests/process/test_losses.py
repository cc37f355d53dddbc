"""What a job must not be lost for: a worker that was killed, a death before the first step, nothing saved yet, a
process that can't be killed. And what is no death: a script that leaves by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from running import JOBS, LAUNCHER, Reference, Run, launch, read_events, start
from saved_jobs import RANKS, command, kill_together, pid_of, wait_for, wait_for_step

STEPS = 40
"""Ten seconds, of a job that goes slowly: more than there is between two lines of a test."""


def slow(run_dir: Path, *arguments: str) -> list[str]:
    """Until ``enough``."""
    return command(run_dir, "--steps", str(STEPS), "--pace", str(run_dir / "enough"), *arguments)


def ended(process: subprocess.Popen[str], run_dir: Path) -> Run:
    out, err = process.communicate(timeout=100)
    return Run(run_dir, process.returncode, out, err, read_events(run_dir))


@pytest.mark.timeout(120)
def test_a_killed_data_loader_worker_costs_its_rank(run_dir: Path, undisturbed: Reference) -> None:
    """As the kernel kills one when memory runs out. It lives as long as its rank: others are gone between epochs."""
    variant = "workers+persistent"
    with start(slow(run_dir, "--variant", variant)) as process:
        wait_for_step(run_dir, 2)
        worker = psutil.Process(pid_of(run_dir, 1)).children()[0]
        worker.kill()
        wait_for(run_dir, process, "resumed")
        (run_dir / "enough").touch()
        run = ended(process, run_dir)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS, variant=variant).digests(), run.explain()
    (lost,) = run.of("worker_lost")
    assert lost["rank"] == 1
    assert f"(pid {worker.pid}) is killed by signal" in lost["detail"]["error"]
    assert "rank 1 has lost a worker, and is replaced" in run.err


def test_a_rank_that_leaves_with_0_ends_the_job_with_1(run_dir: Path) -> None:
    """``os._exit(0)`` looks like a death to whoever watches the process; it is a decision of the script's."""
    run = launch(run_dir, "ends.py", "leave", ranks=2)
    assert run.code == 1, run.explain()
    (line,) = [line for line in run.err.splitlines() if "resilient-run: the job ends" in line]
    assert "rank 1 left with exit code 0 while the others were still training" in line


@pytest.mark.timeout(120)
def test_all_lost_before_the_first_snapshot_begin_anew(run_dir: Path, undisturbed: Reference) -> None:
    with start(slow(run_dir, "--save", "50")) as process:
        wait_for_step(run_dir, 3)
        kill_together(process, [pid_of(run_dir, rank) for rank in range(RANKS)])
        wait_for(run_dir, process, "started", 2)
        (run_dir / "enough").touch()
        run = ended(process, run_dir)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests(), run.explain()
    assert "there is no saved state to go on from: all ranks begin anew" in run.err


def test_all_lost_without_saves_end_the_job(run_dir: Path) -> None:
    with start(slow(run_dir)) as process:
        wait_for_step(run_dir, 3)
        kill_together(process, [pid_of(run_dir, rank) for rank in range(RANKS)])
        run = ended(process, run_dir)
    assert run.code == 75, run.explain()


DIES = """
import os, signal
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
USES_US = "from imported import train\ntrain()\n"
NOT_US = "print('done')\n"


COLD = pytest.param(("--standby", "0"), marks=pytest.mark.long)


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), COLD], ids=["forked", "cold"])
def test_a_rank_killed_in_its_imports_starts_again(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """No rank has said a word to the agent by then; the script's text tells that one would have."""
    (tmp_path / "imported.py").write_text((JOBS / "imported.py").read_text())
    (tmp_path / "script.py").write_text(DIES + USES_US)
    run = launch(tmp_path / "run", tmp_path / "script.py", ranks=2, flags=flags)
    assert run.code == 0, run.explain()
    assert len(run.of("restart_all")) == 1
    assert len(run.of("session_end")) == 2


def test_a_script_without_us_is_none_of_our_business(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DIES + NOT_US)
    run = launch(tmp_path / "run", tmp_path / "script.py", ranks=2)
    assert run.code == 137, run.explain()
    assert "no Session" in run.err


@contextmanager
def freezable(folder: Path) -> Iterator[Path]:
    """A file system that can be frozen: whoever writes to it then waits, and not even SIGKILL ends that."""

    def run(*words: str | Path) -> None:
        subprocess.run(words, check=True, capture_output=True, timeout=60)

    image, mounted = folder / "image", folder / "mounted"
    image.write_bytes(bytes(16 << 20))
    mounted.mkdir()
    run("mkfs.ext4", "-q", image)
    run("mount", "-o", "loop", image, mounted)
    try:
        yield mounted
    finally:
        subprocess.run(["fsfreeze", "-u", mounted], capture_output=True, timeout=60, check=False)
        deadline = time.monotonic() + 60
        while subprocess.run(["umount", mounted], capture_output=True, timeout=60, check=False).returncode:
            assert time.monotonic() < deadline, "it stays busy"
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_process_that_can_not_be_killed_costs_time_and_no_job(tmp_path: Path, run_dir: Path, times: int) -> None:
    """Nor does the one that takes its place, and can't be killed either."""
    limits = {"RESILIENT_HANG_TIMEOUT_S": "1.5", "RESILIENT_JOIN_TIMEOUT_S": "4"}
    with freezable(tmp_path) as storage:
        script = [str(JOBS / "frozen.py"), str(storage / "first"), str(times)]
        with start([*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), *script], **limits) as process:
            deadline = time.monotonic() + 60
            while not (run_dir / "ready").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            subprocess.run(["fsfreeze", "-f", storage], check=True, timeout=60)
            (run_dir / "frozen").touch()
            run = ended(process, run_dir)
            stuck = [e["detail"]["pid"] for e in run.of("spawned") if e["rank"] == 1][:times]
            states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in stuck]
    assert run.code == 0, run.explain()
    assert states == ["D"] * times, "they could be killed, so nothing is shown"
    assert len(run.of("spawned")) >= 2 + times
    assert ("it does not end, and is given up" in run.err) == (times == 2), run.err


HANGS = """
import os
from pathlib import Path
here = Path(HERE)
imported_by = os.getpid()

def once(who):
    try:
        with (here / who).open("x") as told:
            told.write(str(os.getpid()))
    except FileExistsError:
        return
    (here / "mounted" / who).write_bytes(bytes(1 << 16))

def before_fork():
    if (here / "now").exists() and os.getpid() == imported_by:
        once("zygote")

os.register_at_fork(before=before_fork)
"""
STANDS_BY = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import hangs
import resilient_train as rt
from resilient_train import standby_stage

if standby_stage.stage is not None and sys.argv[1] == "spare":
    hangs.once("spare")
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(1000):
        with step:
            if not (hangs.here / "enough").exists():
                time.sleep(0.05)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
"""


def wait_for_file(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"no {path.name} came"
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize(
    ("who", "event"),
    [pytest.param("zygote", "standby_lost", marks=pytest.mark.long), ("spare", "standby_shallow")],
)
def test_a_standby_that_can_not_be_killed_holds_nobody_up(tmp_path: Path, run_dir: Path, who: str, event: str) -> None:
    """Neither two recoveries nor the end of the job: the agent has one thread, and waits for neither of them."""
    folder, environ = tmp_path, {"RESILIENT_STANDBY_DEPTH": "built", "RESILIENT_STANDBY_LIMIT_S": "1"}
    if who == "zygote":  # it imports what is installed, and none of the modules beside the script
        folder = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(tmp_path)}))
        folder.mkdir(parents=True)
        environ = {"PYTHONUSERBASE": str(tmp_path), "PYTHONPATH": str(folder)}
    (folder / "hangs.py").write_text(HANGS.replace("HERE", repr(str(tmp_path))))
    (tmp_path / "script.py").write_text(STANDS_BY)
    script = [str(tmp_path / "script.py"), who]
    with freezable(tmp_path) as storage:
        subprocess.run(["fsfreeze", "-f", storage], check=True, timeout=60)
        with start([*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), *script], **environ) as process:
            wait_for(run_dir, process, "started")
            wait_for(run_dir, process, "standby_ready")
            (tmp_path / "now").touch()
            for times, rank in enumerate((1, 0), 1):
                os.kill(pid_of(run_dir, rank), signal.SIGKILL)
                wait_for(run_dir, process, "resumed", times)
                wait_for_file(tmp_path / who, process)
            wait_for(run_dir, process, event)
            (tmp_path / "enough").touch()
            run = ended(process, run_dir)
        stuck = psutil.Process(int((tmp_path / who).read_text()))
        assert stuck.status() == psutil.STATUS_DISK_SLEEP, "it could be killed, so nothing is shown"
    psutil.wait_procs([stuck], timeout=60)
    assert run.code == 0, run.explain()
    assert len(run.of("session_end")) == 2
