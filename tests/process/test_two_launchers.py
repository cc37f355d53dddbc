"""Two launchers with one run directory (a requeue, a wrapper that tries again): the second leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, Run, read_events, start
from saved_jobs import RANKS, STEPS, command, pid_of, wait_for, wait_for_step

from resilient_train.protocol import messages as m
from resilient_train.transport import Channel


@pytest.mark.timeout(120)
def test_the_second_leaves_and_the_first_trains_on(tmp_path: Path, undisturbed: Reference) -> None:
    run_dir = tmp_path / "run"
    with start(command(run_dir, "--pace", str(run_dir / "enough"))) as first:
        wait_for_step(run_dir, 2)
        before = sorted(path.name for path in run_dir.iterdir())
        with start(command(run_dir)) as second:
            _, err = second.communicate(timeout=60)
        assert second.returncode == 2, err
        (line,) = [line for line in err.splitlines() if line.startswith("resilient-run:")]
        assert f"process {first.pid} on {socket.gethostname()}" in line
        assert sorted(path.name for path in run_dir.iterdir()) == before
        os.kill(pid_of(run_dir, 1), signal.SIGKILL)
        wait_for(run_dir, first, "resumed")
        (run_dir / "enough").touch()
        out, err = first.communicate(timeout=60)
    run = Run(run_dir, first.returncode, out, err, read_events(run_dir))
    assert_identical(run, undisturbed(ranks=RANKS, steps=STEPS), ranks=RANKS, recoveries=1)
    with start(command(run_dir)) as third:
        assert third.wait(60) == 0, third.communicate()


CHILD = """
import os, sys
import torch, torch.distributed as dist
import resilient_train as rt

if "child" in sys.argv:
    model = torch.nn.Linear(2, 2)
    rt.Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    sys.exit("it has a Session")
dist.init_process_group("gloo")
import subprocess
if dist.get_rank() == 1:
    child = subprocess.run([sys.executable, sys.argv[0], "child"], capture_output=True, text=True)
    print("child:", child.stderr.splitlines()[-1], flush=True)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(3):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_what_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    """It has inherited all the variables, and comes first: what it says of its Session is not the job's end."""
    (tmp_path / "script.py").write_text(CHILD)
    run_dir = tmp_path / "run"
    with start([*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), str(tmp_path / "script.py")]) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    assert "child: resilient_train.errors.ConfigError" in out
    (told,) = [event["detail"]["text"] for event in read_events(run_dir) if event["kind"] == "foreign_frame"]
    assert "is not the one that was started as rank 1" in told


@pytest.mark.long
def test_who_is_killed_behind_a_wrapper_is_started_again(tmp_path: Path) -> None:
    """Before the first step nobody else tells: the shell lives on, and exits with 137, which is no decision."""
    run_dir = tmp_path / "run"
    wrapper = ["bash", "-c", f"{sys.executable} {JOBS / 'restarted.py'}; exit $?"]
    flags = ["--nproc-per-node", "2", "--run-dir", str(run_dir), "--no-python"]
    with start([*LAUNCHER, *flags, *wrapper]) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    assert len([event for event in read_events(run_dir) if event["kind"] == "restart_all"]) == 1, err


def answer(path: Path, *frames: m.Hello) -> m.FromAgent | None:
    channel = Channel(str(path))
    try:
        for frame in frames:
            channel.send(frame)
        return channel.receive(10)
    finally:
        channel.close()


def test_strangers_ranks_and_other_versions_are_told_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(command(run_dir, "--pace", str(run_dir / "never"))) as process:
        wait_for_step(run_dir, 2)
        agent = run_dir / "agent-0.sock"
        lines = Path(f"/proc/{pid_of(run_dir, 1)}/environ").read_text().split("\0")
        environ = {"RESILIENT_TOKEN": ""} | dict(line.split("=", 1) for line in lines if line.startswith("RESILIENT_"))
        replies = [
            answer(agent, m.Hello("rank", 1, 0, os.getpid(), token="another's")),
            answer(agent, m.Hello("rank", 1, 0, os.getpid(), token=environ["RESILIENT_TOKEN"])),
            answer(agent, m.Hello("operator", version=m.PROTOCOL_VERSION + 1)),
        ]
        assert all(isinstance(each, m.Reply) for each in replies), replies
        texts = [each.error for each in replies]
        assert "started by another launcher" in texts[0]
        assert texts[1]
        assert f"version {m.PROTOCOL_VERSION + 1} of the protocol" in texts[2]
        asked = subprocess.run(
            [sys.executable, "-m", "resilient_train.launch.cli.tool", "status", str(run_dir), "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert asked.returncode == 0, asked.stderr
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert len([event for event in read_events(run_dir) if event["kind"] == "foreign_frame"]) >= 3
