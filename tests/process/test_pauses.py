"""Ranks that are paused: all together, nobody is to blame; some of them, they are replaced, but never the last."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, Run, read_events, start
from saved_jobs import pid_of, wait_for, wait_for_step

RANKS, STEPS = 3, 40
ALL = tuple(range(RANKS))


class Paced:
    """A job that makes some six steps a second until ``end``."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[str]) -> None:
        self.run_dir = run_dir
        self.process = process

    def signal(self, numbers: dict[int, int]) -> None:
        """Each rank gets its signal, and nothing is done in between: the agent would act on the first ones alone."""
        pids = {rank: pid_of(self.run_dir, rank) for rank in numbers}
        for rank, number in numbers.items():
            os.kill(pids[rank], number)

    def stop(self, *ranks: int) -> None:
        self.signal(dict.fromkeys(ranks, signal.SIGSTOP))

    def go_on(self, *ranks: int) -> None:
        self.signal(dict.fromkeys(ranks, signal.SIGCONT))

    def moves(self) -> None:
        """Until rank 0 has made two steps more."""
        path = self.run_dir / "samples_rank0.jsonl"
        wait_for_step(self.run_dir, path.read_bytes().count(b"\n") + 2)

    def await_resumed(self, times: int) -> None:
        wait_for(self.run_dir, self.process, "resumed", times)

    def end(self) -> Run:
        (self.run_dir / "enough").touch()
        out, err = self.process.communicate(timeout=100)
        return Run(self.run_dir, self.process.returncode, out, err, read_events(self.run_dir))


@contextmanager
def training(run_dir: Path, **environ: str) -> Iterator[Paced]:
    script = [str(JOBS / "train.py"), "--steps", str(STEPS), "--pace", str(run_dir / "enough")]
    command = [*LAUNCHER, "--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), *script]
    with start(command, **environ) as process:
        wait_for_step(run_dir, 10)  # what is usual is known by then
        yield Paced(run_dir, process)


@pytest.mark.timeout(180)
def test_all_paused_together_nobody_is_killed(tmp_path: Path, undisturbed: Reference) -> None:
    with training(tmp_path / "run") as job:
        job.stop(*ALL)
        time.sleep(1)
        job.go_on(*ALL)
        job.moves()
        # The machine was: the agent goes on first, and its clock has jumped.
        job.stop(*ALL)
        job.process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        job.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        job.go_on(*ALL)
        job.moves()
        # One after the other.
        job.stop(*ALL)
        time.sleep(0.5)
        for rank in ALL:
            job.go_on(rank)
            time.sleep(0.4)
        job.moves()
        run = job.end()
    assert_identical(run, undisturbed(ranks=RANKS, steps=STEPS), ranks=RANKS, recoveries=0)
    assert len(run.of("spawned")) == RANKS, run.explain()
    assert run.of("hung") == run.of("fault") == []


SHORT = {"RESILIENT_HANG_TIMEOUT_S": "3", "RESILIENT_JOIN_TIMEOUT_S": "3"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("limits", "pause_s"), [(SHORT, 11), pytest.param({}, 62, marks=pytest.mark.long)], ids=["short", "a-minute"]
)
def test_all_paused_for_longer_than_any_limit(
    tmp_path: Path, undisturbed: Reference, limits: dict[str, str], pause_s: int
) -> None:
    """Or for a minute, with the limits that a job has of itself."""
    with training(tmp_path / "run", **limits) as job:
        job.stop(*ALL)
        time.sleep(pause_s)
        wait_for(job.run_dir, job.process, "stood_still", pause_s // 10)  # where the agent did not run, no time passes
        job.go_on(*ALL)
        job.moves()
        run = job.end()
    assert_identical(run, undisturbed(ranks=RANKS, steps=STEPS), ranks=RANKS, recoveries=0)
    assert len(run.of("spawned")) == RANKS
    told = [line for line in run.err.splitlines() if "no rank has run for" in line]
    assert len(told) == pause_s // 10, "one line each ten seconds"
    assert all("kill -CONT" in line for line in told)


@pytest.mark.timeout(180)
def test_whoever_is_not_continued_is_replaced(tmp_path: Path, undisturbed: Reference) -> None:
    with training(tmp_path / "run") as job:
        job.stop(*ALL)
        time.sleep(1)
        job.go_on(0, 2)
        job.await_resumed(1)
        job.moves()
        job.stop(1, 2)  # all but one
        job.await_resumed(2)
        job.moves()
        run = job.end()
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests(), run.explain()
    replaced = [event["rank"] for event in run.of("spawned")][RANKS:]
    assert sorted(replaced) == [1, 1, 2], run.explain()


@pytest.mark.timeout(180)
def test_survivors_that_are_paused_in_a_recovery_are_waited_for(tmp_path: Path, undisturbed: Reference) -> None:
    """They alone have the state: as once after a second, so after any time."""
    with training(tmp_path / "run", **SHORT) as job:
        job.signal({0: signal.SIGSTOP, 2: signal.SIGSTOP, 1: signal.SIGKILL})
        wait_for(job.run_dir, job.process, "spared", 2)  # hung, and later than anybody may come
        job.go_on(0, 2)  # the next look at who has not come is as far away as it can be
        job.await_resumed(1)
        run = job.end()
    assert_identical(run, undisturbed(ranks=RANKS, steps=STEPS), ranks=RANKS, recoveries=run.recoveries())
    assert {event["rank"] for event in run.of("spawned")[RANKS:]} == {1}, run.explain()
    assert "nobody else has its state" in run.err
    assert "did not join the recovery within 3 s" in run.of("spared")[1]["detail"]["reason"], run.explain()


@pytest.mark.timeout(120)
def test_one_that_is_stopped_before_the_first_step(tmp_path: Path, undisturbed: Reference) -> None:
    """The others would wait for it for ever: all start again. Found by the soak."""
    run_dir, held = tmp_path / "run", tmp_path / "held"
    held.touch()
    script = [str(JOBS / "train.py"), "--steps", "9", "--hold", str(held)]
    command = [*LAUNCHER, "--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), *script]
    with start(command) as process:
        wait_for(run_dir, process, "spawned", RANKS)
        for times in (1, 2):
            os.kill(pid_of(run_dir, 1), signal.SIGSTOP)
            wait_for(run_dir, process, "restart_all", times)
            wait_for(run_dir, process, "spawned", RANKS * (times + 1))
        held.unlink()
        out, err = process.communicate(timeout=100)
    run = Run(run_dir, process.returncode, out, err, read_events(run_dir))
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=9).digests(), run.explain()
    first, second = run.of("restart_all")
    for again in (first, second):
        assert "stopped (SIGSTOP) before the first step" in again["detail"]["reason"]
