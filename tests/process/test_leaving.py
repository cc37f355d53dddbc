"""A job that has to end saves what it has, and the next one in its run directory goes on from there, bit for bit."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from running import JOBS, Reference, Run, read_events, start
from saved_jobs import RANKS, STEPS, command, pid_of, wait_for, wait_for_step
from watched_jobs import end_holder, holder_pid

from resilient_train.state.checkpoint.verify import newest_complete, verify

FEW_BYTES = 16384
"""A checkpoint has larger files."""


def ended(process: subprocess.Popen[str], run_dir: Path) -> Run:
    out, err = process.communicate(timeout=100)
    return Run(run_dir, process.returncode, out, err, read_events(run_dir))


def slow(run_dir: Path, *arguments: str) -> list[str]:
    return command(run_dir, "--pace", str(run_dir / "never"), *arguments)


def goes_on(run_dir: Path, undisturbed: Reference, source: str = "storage") -> None:
    """Started again, the job ends as one that nobody has disturbed."""
    if source == "storage":
        end_holder(run_dir)
    with start(command(run_dir)) as process:
        run = ended(process, run_dir)
    assert run.code == 0, run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {source}, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests(), run.explain()


def last(run_dir: Path) -> Path:
    (path,) = (run_dir / "checkpoints").glob("ttp_saved_checkpoints-step_*")
    assert verify(path).ok, verify(path)
    return path


@pytest.mark.parametrize(
    ("number", "code", "whom"),
    [(signal.SIGTERM, 143, "rank"), pytest.param(signal.SIGUSR1, 75, "launcher", marks=pytest.mark.long)],
)
def test_a_job_that_is_asked_to_end_saves_its_state(
    run_dir: Path, undisturbed: Reference, number: int, code: int, whom: str
) -> None:
    with start(slow(run_dir)) as process:
        wait_for_step(run_dir, 4)
        os.kill(process.pid if whom == "launcher" else pid_of(run_dir, 1), number)
        run = ended(process, run_dir)
    assert run.code == code, run.explain()
    assert str(last(run_dir)) in run.err, "a person wants to know where"
    goes_on(run_dir, undisturbed)


@pytest.mark.parametrize("flags", [pytest.param(("--max-restarts", "0"), marks=pytest.mark.long), ()])
def test_survivors_save_what_a_dead_rank_leaves(run_dir: Path, undisturbed: Reference, flags: tuple[str, ...]) -> None:
    switches = {} if flags else {"MS_ENABLE_TFT": "{TTP:1,UCE:1,HCCE:1}"}
    paced = command(run_dir, "--pace", str(run_dir / "never"), flags=flags)
    with start(paced, **switches) as process:
        wait_for_step(run_dir, 4)
        os.kill(pid_of(run_dir, 1), signal.SIGKILL)
        run = ended(process, run_dir)
    assert run.code == 75, run.explain()
    (choice,) = run.of("save_last")
    assert 1 not in choice["detail"]["savers"][0]
    last(run_dir)
    if choice["detail"]["exact"]:
        goes_on(run_dir, undisturbed)


def test_survivors_that_were_cut_behind_the_update(run_dir: Path) -> None:
    """The collectives there can't be completed without the dead; the state is whole all the same, and it is told."""
    plan = ("--faults", "kill rank=1 step=5 phase=APPLIED")
    with start(command(run_dir, flags=("--max-restarts", "0", *plan))) as process:
        run = ended(process, run_dir)
    assert run.code == 75, run.explain()
    (choice,) = run.of("save_last")
    assert choice["detail"]["commits"] == 6
    assert not choice["detail"]["exact"]
    assert "its own values" in run.err
    assert last(run_dir).name.endswith("step_6")
    end_holder(run_dir)
    with start(command(run_dir)) as process:
        again = ended(process, run_dir)
    assert again.code == 0, again.explain()
    assert len({params for params, _ in again.digests().values()}) == 1


def test_where_the_script_is_gone_the_survivors_save(run_dir: Path, tmp_path: Path) -> None:
    """And its copy. A replacement can't read it, which is its own end: no bug of the agent's, and no reason to lose
    the state.
    """
    script = tmp_path / "train.py"
    shutil.copyfile(JOBS / "train.py", script)
    paced = [str(script) if part == str(JOBS / "train.py") else part for part in slow(run_dir)]
    with start(paced) as process:
        wait_for_step(run_dir, 4)
        script.unlink()
        for kept in run_dir.glob("code-*"):
            shutil.rmtree(kept)
        os.kill(pid_of(run_dir, 1), signal.SIGKILL)
        run = ended(process, run_dir)
    assert run.code == 1, run.explain()
    assert [event["rank"] for event in run.of("spawned")][RANKS:] == [1], run.explain()
    assert str(last(run_dir)) in run.err


def test_where_storage_fails_the_state_stays_in_memory(run_dir: Path, undisturbed: Reference) -> None:
    folder = run_dir / "checkpoints"
    with start(slow(run_dir, "--save", "100")) as process:
        wait_for_step(run_dir, 4)
        writer = holder_pid(run_dir)
        assert writer, "a job that saves has a holder from its start, and it is the one that writes"
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (FEW_BYTES, resource.RLIM_INFINITY))
        os.kill(process.pid, signal.SIGTERM)
        run = ended(process, run_dir)
    assert run.code == 143, run.explain()
    (failed,) = run.of("save_failed")
    assert "EFBIG" in failed["detail"]["reason"]
    assert "its state could not be saved" in run.err
    assert "(in memory, within 60 s" in run.err, "a person wants to know that there is not much time"
    assert not list(folder.iterdir()), "half a checkpoint stays"
    goes_on(run_dir, undisturbed, source="memory")


def test_switched_off_it_ends_at_once(run_dir: Path) -> None:
    with start(slow(run_dir), MS_ENABLE_TFT="{HCCE:1}") as process:
        wait_for_step(run_dir, 4)
        os.kill(process.pid, signal.SIGTERM)
        run = ended(process, run_dir)
    assert run.code == 143
    assert not (run_dir / "checkpoints").exists()


def test_asked_twice_it_ends_at_once(run_dir: Path) -> None:
    with start(slow(run_dir), RESILIENT_HANG="0") as process:
        wait_for_step(run_dir, 4)
        os.kill(pid_of(run_dir, 0), signal.SIGSTOP)  # it will not come to the head of a step, nor be replaced
        os.kill(process.pid, signal.SIGTERM)
        wait_for(run_dir, process, "leaving")
        began_s = time.monotonic()
        while process.poll() is None:  # what comes within a second is one request
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.001)  # the last of them come while the launcher tells how the job has ended
        assert time.monotonic() - began_s > 0.5
        run = ended(process, run_dir)
    assert run.code == 143, run.explain()
    assert not (run_dir / "checkpoints").exists()


def test_who_is_late_is_left_out(run_dir: Path, tmp_path: Path, undisturbed: Reference) -> None:
    """Asked to end in a recovery whose replacement does not come: the survivors have all that there is to save."""
    hold = tmp_path / "hold"
    with start(slow(run_dir, "--hold", str(hold)), RESILIENT_EXIT_GRACE_S="8") as process:
        wait_for_step(run_dir, 4)
        hold.touch()
        os.kill(pid_of(run_dir, 1), signal.SIGKILL)
        wait_for(run_dir, process, "fault")
        os.kill(process.pid, signal.SIGTERM)
        run = ended(process, run_dir)
    assert run.code == 143, run.explain()
    assert "rank 1 has not come in half of the time" in run.explain()
    (choice,) = run.of("save_last")
    # Killed behind the update, the others finish it alone, each with values of its own: then one saves.
    exact, savers = choice["detail"]["exact"], choice["detail"]["savers"]
    assert savers == [[0, 2]] if exact else savers in ([[0]], [[2]])
    assert str(last(run_dir)) in run.err
    if exact:
        goes_on(run_dir, undisturbed)


def test_where_no_time_is_left_it_says_so(run_dir: Path) -> None:
    with start(slow(run_dir), RESILIENT_EXIT_GRACE_S="0.5", RESILIENT_HANG="0") as process:
        wait_for_step(run_dir, 4)
        for rank in range(RANKS):
            os.kill(pid_of(run_dir, rank), signal.SIGSTOP)
        os.kill(process.pid, signal.SIGTERM)
        run = ended(process, run_dir)
    assert run.code == 143, run.explain()
    assert "RESILIENT_EXIT_GRACE_S" in run.err


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 13))])
def test_asked_at_any_moment(run_dir: Path, undisturbed: Reference, seed: int) -> None:
    """In a step, in a save, in a recovery: a complete checkpoint, and the bits of an undisturbed run."""
    chance = random.Random(seed)
    with start(slow(run_dir, "--save", "2")) as process:
        wait_for_step(run_dir, 3 + chance.randrange(4))
        if seed % 3:
            os.kill(pid_of(run_dir, chance.randrange(RANKS)), signal.SIGKILL)
        time.sleep(chance.random() * 0.3)
        os.kill(process.pid, signal.SIGTERM)
        run = ended(process, run_dir)
    assert run.code == 143, run.explain()
    found = newest_complete(run_dir / "checkpoints")
    assert found.report is not None
    assert found.report.path == last(run_dir), run.explain()
    goes_on(run_dir, undisturbed)
