"""An operator, or the script, has the job stand still: all before the same step, whatever befalls it meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, Run, launch, read_events, start
from saved_jobs import kill_together, pid_of, wait_for, wait_for_step
from watched_jobs import end_holder, gone, wait

from resilient_train.launch.cli.asking import ask
from resilient_train.launch.cli.tool import main
from resilient_train.protocol.messages import Pause, Query
from resilient_train.state.checkpoint.verify import verify

RANKS, STEPS = 3, 40
LAST = STEPS - 1


class Job:
    """A job that makes some six steps a second until ``end``."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
        self.run_dir = run_dir
        self.process = process
        self._capsys = capsys

    def tool(self, command: str, *flags: str, code: int = 0) -> Any:
        """What the command says: its JSON, or the line with which it fails."""
        self._capsys.readouterr()
        found = main([command, str(self.run_dir), "--json", *flags])
        out, err = self._capsys.readouterr()
        assert found == code, (out, err)
        assert len(err.splitlines()) == bool(code), err
        return err if code else json.loads(out)

    def status(self) -> dict[str, Any]:
        return ask(self.run_dir, Query()).status

    def made(self) -> list[int]:
        """How many steps each rank has recorded."""
        return [(self.run_dir / f"samples_rank{r}.jsonl").read_bytes().count(b"\n") for r in range(RANKS)]

    def stands(self, step: int, seconds: float = 0.5) -> None:
        """Nobody makes a step; the processes live."""
        before, beats = self.made(), [row["beats"] for row in self.status()["ranks"]]
        time.sleep(seconds)
        wait(
            lambda: all(row["beats"] > beat for row, beat in zip(self.status()["ranks"], beats, strict=True)), "no beat"
        )
        status = self.status()
        assert self.made() == before
        assert status["stage"] == "PAUSED", status
        assert status["paused"]["step"] == step
        assert {row["step"] for row in status["ranks"]} == {row["commits"] for row in status["ranks"]} == {step}, status

    def kill(self, rank: int) -> None:
        os.kill(pid_of(self.run_dir, rank), signal.SIGKILL)

    def waits(self, kind: str, times: int = 1) -> None:
        wait_for(self.run_dir, self.process, kind, times)

    def stand_again(self, spawned: int) -> None:
        """Until so many processes were started, and behind the last of them all stand: in one recovery, or in two."""

        def stand() -> bool:
            kinds = [event["kind"] for event in read_events(self.run_dir)]
            return kinds.count("spawned") == spawned and "paused" in kinds[len(kinds) - kinds[::-1].index("spawned") :]

        wait(stand, "they do not stand again")

    def end(self) -> Run:
        (self.run_dir / "enough").touch()
        out, err = self.process.communicate(timeout=100)
        return Run(self.run_dir, self.process.returncode, out, err, read_events(self.run_dir))


def paced(run_dir: Path, *arguments: str) -> list[str]:
    script = [str(JOBS / "train.py"), "--steps", str(STEPS), "--pace", str(run_dir / "enough"), *arguments]
    return [*LAUNCHER, "--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), *script]


@contextmanager
def training(
    run_dir: Path, capsys: pytest.CaptureFixture[str], *arguments: str, step: int = 3, **environ: str
) -> Iterator[Job]:
    with start(paced(run_dir, *arguments), **environ) as process:
        wait_for_step(run_dir, step)
        yield Job(run_dir, process, capsys)


def same(run: Run, undisturbed: Reference, recoveries: int) -> None:
    assert_identical(run, undisturbed(ranks=RANKS, steps=STEPS), ranks=RANKS, recoveries=recoveries)
    assert run.of("hung") == run.of("suspect") == run.of("together") == [], run.explain()


@pytest.mark.timeout(180)
def test_all_stand_before_one_step_and_go_on(
    tmp_path: Path, undisturbed: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(tmp_path / "run", capsys) as job:
        begun_s = time.monotonic()
        told = job.tool("pause")
        took_s = time.monotonic() - begun_s
        step = told["step"]
        assert told["paused"]
        job.stands(step)
        assert job.made() == [step] * RANKS
        assert f"paused already, before step {step}" in job.tool("pause", code=2)
        assert "paused already" in job.tool("pause", "--at-step", str(step + 5), code=2)
        ended = job.tool("resume")
        assert (ended["was"], ended["step"]) == ("PAUSED", step)
        assert ended["paused_s"] > 0
        wait_for_step(job.run_dir, step + 1)
        assert "not paused (RUNNING)" in job.tool("resume", code=2)
        assert "has begun already" in job.tool("pause", "--at-step", str(step), code=2)
        # One that is taken back before it comes.
        asked = job.tool("pause", "--at-step", str(LAST))
        assert asked == {"run": str(job.run_dir), "at_step": LAST, "paused": False, "step": None}
        assert job.status()["pause_at"] == LAST
        assert f"asked for already, before step {LAST}" in job.tool("pause", "--at-step", str(LAST), code=2)
        assert job.tool("resume")["was"] == "RUNNING"
        # An earlier step takes the place of a later one; no rank is further.
        job.tool("pause", "--at-step", str(LAST))
        sooner = LAST - 1  # seconds away, at this pace
        job.tool("pause", "--at-step", str(sooner))
        (job.run_dir / "enough").touch()
        job.waits("paused", 2)
        job.stands(sooner)
        assert job.made() == [sooner] * RANKS
        job.tool("resume")
        run = job.end()
    same(run, undisturbed, 2)
    listed = job.tool("report")["pauses"]
    assert [(pause["outcome"], pause["step"]) for pause in listed] == [
        *(("resumed", step), ("withdrawn", None), ("withdrawn", None), ("resumed", sooner))
    ]
    assert listed[0]["by"] == "operator"
    assert listed[0]["length_s"] >= 0.5
    assert 0 < listed[0]["gather_s"] < took_s, "the command waits for all"
    assert [event["detail"]["step"] for event in run.of("paused")] == [step, sooner]
    assert [event["detail"]["at_step"] for event in run.of("pause_asked")] == [0, LAST, LAST, sooner]
    assert len(run.of("pause_withdrawn")) == 1
    assert run.of("fault") == []
    assert f"paused before step {step}: all ranks stand" in run.err
    assert "the pause is over after" in run.err


@pytest.mark.timeout(240)
def test_faults_in_a_pause_and_around_it(
    tmp_path: Path, undisturbed: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(tmp_path / "run", capsys, RESILIENT_HANG_TIMEOUT_S="2") as job:
        step = job.tool("pause")["step"]
        job.stands(step, 2.5)  # longer than anybody may stand still in a step
        job.kill(1)
        job.waits("paused", 2)
        job.stands(step)
        job.kill(0)
        job.kill(2)
        job.stand_again(RANKS + 3)
        job.stands(step)
        job.tool("resume")
        wait_for_step(job.run_dir, step + 1)
        # Asked for in a recovery: it is carried out at its end. And a second fault before that.
        faults = len(of(job, "fault"))
        job.kill(1)
        job.waits("fault", faults + 1)
        ask(job.run_dir, Pause())
        job.kill(2)
        job.stand_again(RANKS + 5)
        step = job.status()["paused"]["step"]
        job.stands(step)
        job.tool("resume")
        wait_for_step(job.run_dir, step + 1)
        run = job.end()
    same(run, undisturbed, run.recoveries())
    assert {event["detail"]["start"] for event in run.of("spawned")[RANKS:]} <= {"forked", "cold"}
    assert len(run.of("spawned")) == RANKS + 5, run.explain()


def of(job: Job, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(job.run_dir) if event["kind"] == kind]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_all_ranks_die_in_a_pause_and_in_the_next_it_is_asked_to_end(
    tmp_path: Path, undisturbed: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """They start again from what was saved, and stand there. And who is asked to end saves its state."""
    run_dir = tmp_path / "run"
    with training(run_dir, capsys, "--save", "5", step=6) as job:
        step = job.tool("pause")["step"]
        job.waits("saved")  # else there may be nothing to start from
        kill_together(job.process, [pid_of(run_dir, rank) for rank in range(RANKS)])
        job.waits("restart_all")
        job.waits("paused", 2)
        stands = job.status()["paused"]["step"]
        assert 0 < stands <= step
        assert stands % 5 == 0
        saved = len(of(job, "saved"))
        job.tool("resume")
        wait_for_step(run_dir, max(job.made()) + 5)
        step = job.tool("pause")["step"]
        assert step > stands
        job.waits("saved", saved + 1)  # what was on its way to storage comes there
        job.stands(step)
        job.process.send_signal(signal.SIGTERM)
        run = job.end()
    assert run.code == 143, run.explain()
    (last,) = (run_dir / "checkpoints").glob("ttp_saved_checkpoints-step_*")
    assert last.name.endswith(f"step_{step}")
    assert verify(last).ok
    end_holder(run_dir)
    with start(paced(run_dir, "--save", "5")) as process:
        out, err = process.communicate(timeout=100)
    again = Run(run_dir, process.returncode, out, err, read_events(run_dir))
    end_holder(run_dir)
    assert again.code == 0, again.explain()
    assert again.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests()


@pytest.mark.timeout(180)
def test_before_the_first_step_and_behind_the_last(
    tmp_path: Path, undisturbed: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, held = tmp_path / "run", tmp_path / "held"
    held.touch()
    with start(paced(run_dir, "--hold", str(held))) as process:
        wait_for(run_dir, process, "spawned", RANKS)
        job = Job(run_dir, process, capsys)
        job.tool("pause", "--at-step", "0")
        held.unlink()
        job.waits("paused")
        time.sleep(0.3)
        assert not list(run_dir.glob("samples_rank*"))
        job.kill(1)  # nobody has made a step; it is replaced all the same
        job.waits("paused", 2)
        assert job.status()["paused"]["step"] == 0
        job.tool("resume")
        wait_for_step(run_dir, 1)
        job.tool("pause", "--at-step", "1000")
        run = job.end()
    same(run, undisturbed, 1)
    assert run.of("finished")[0]["detail"] == {"pause_at": 1000}
    assert "before step 1000, was not reached" in run.err


@pytest.mark.timeout(180)
def test_the_script_pauses_and_hears_of_it(
    tmp_path: Path, undisturbed: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks ask, and the function draws random numbers; a fault has the step that asks run again."""
    script = ("--on-pause", "fail", "--pause-in", "7")
    with training(tmp_path / "run", capsys, *script, RESILIENT_FAULTS="hcce rank=1 step=7 phase=COMPUTE") as job:
        job.waits("paused")
        job.stands(8)
        job.tool("resume")
        run = job.end()
    same(run, undisturbed, 2)
    assert [(run.run_dir / f"pauses_rank{rank}.txt").read_text() for rank in range(RANKS)] == ["8\n"] * RANKS
    assert {event["rank"] for event in run.of("on_pause_failed")} == set(range(RANKS))
    assert "ValueError('the disk is full')" in run.err
    # It ends the pause itself.
    script = ("--on-pause", "resume", "--pause-in", "5", "--steps", str(STEPS))
    run = launch(tmp_path / "own", "train.py", *script, ranks=RANKS)
    same(run, undisturbed, 1)
    assert len(run.of("paused")) == 1
    assert [event["detail"]["by"][:4] for event in run.of("pause_asked")] == ["rank"]


@pytest.mark.timeout(180)
def test_what_a_function_may_not_do_in_a_pause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with training(tmp_path / "reduce", capsys, "--on-pause", "reduce") as job:
        job.tool("pause")
        job.waits("on_pause_failed", RANKS)
        job.tool("resume")
        run = job.end()
    assert run.code == 0, run.explain()
    assert "was called in a function of session.on_pause" in run.err
    for what, told in (("write", "model.0."), ("lower", "")):
        with training(tmp_path / what, capsys, "--on-pause", what) as job:
            ask(job.run_dir, Pause())
            run = job.end()
        assert run.code == 2, run.explain()
        assert f"session.on_pause has changed {told}" in run.err


@pytest.mark.timeout(120)
def test_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with training(tmp_path / "run", capsys, "--pause-in", "6", MS_ENABLE_TFT="{ARF:1}") as job:
        assert "switched off (MS_ENABLE_TFT has no TSP:1)" in job.tool("pause", code=2)
        run = job.end()
    assert run.code == 0, run.explain()
    assert "session.pause() has no effect: pausing is switched off" in run.err


@pytest.mark.timeout(120)
def test_a_paused_job_whose_agent_dies_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with training(tmp_path / "run", capsys) as job:
        job.tool("pause")
        pids = [row["pid"] for row in job.status()["ranks"]]
        job.process.kill()
        wait(lambda: all(map(gone, pids)), "ranks outlive their agent")
