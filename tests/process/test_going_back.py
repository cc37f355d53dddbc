"""All ranks start again from the best state that is left; and not anew where the storage does not let us see any."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from failing_storage import FailingStorage
from watched_jobs import RANKS, STEPS, Job, end_holder, gone, holder_pid, job, recorded, steps_of, stop, wait

from resilient_train.state.vault.slots import Control


def kill_ranks(running: Job) -> int:
    """All at once. Returns how many updates they had recorded."""
    running.heard("spawned")
    pids = [*running.pids.values()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait(lambda: all(map(gone, pids)), "killed ranks live on")
    return recorded(running.run_dir, RANKS)


def lose_ranks_and_memory(running: Job, holder: int) -> int:
    """The same with what is in memory, and its holder: the launcher would give it to the next one."""
    stop(running.process.pid)
    trained = kill_ranks(running)
    lose_memory(holder)
    os.kill(holder, signal.SIGKILL)
    os.kill(running.process.pid, signal.SIGCONT)
    return trained


def lose_memory(holder: int) -> None:
    """No snapshot counts any more, whoever has it open."""
    for link in Path(f"/proc/{holder}/fd").iterdir():
        if str(link.readlink()).startswith("/memfd:resilient-snapshots"):
            held = Control(os.open(link, os.O_RDWR))
            for snapshot in held.complete():
                held.discard(snapshot.sequence)
            held.close()


def stop_holder(run_dir: Path) -> int:
    """No checkpoint is committed from now on. Returns the holder's process id."""
    pid = holder_pid(run_dir)
    stop(pid)
    return pid


def check_told(running: Job, newest: Path, trained: int, who_fails: str) -> None:
    """Why it was not the newest checkpoint, and how far the job had come."""
    backs = running.heard("restart_all")
    assert all(trained <= back["commits"] <= trained + 1 for back in backs), (trained, backs)
    if who_fails == "all":
        (skipped,) = running.heard("checkpoint_skipped")
        assert skipped["path"] == str(newest)
        assert "Input/output error" in skipped["reason"]
    else:
        assert "Input/output error" in backs[-1]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("who_fails", [pytest.param("all", marks=pytest.mark.long), "ranks"])
def test_one_way_back_after_the_other(run_dir: Path, tmp_path: Path, who_fails: str) -> None:
    """From storage that can't be read all over; from memory, where nothing of it can be read; then nothing is left."""
    failing, folder = FailingStorage(tmp_path), run_dir / "checkpoints"
    hold = tmp_path / "hold"
    paced = ("--steps", str(STEPS), "--save", "2", "--pace", str(run_dir / "never"), "--hold", str(hold))
    with job(run_dir, *paced, **failing.environ) as running:
        running.await_more("saved", 3)
        holder = stop_holder(run_dir)
        older, newest = steps_of(folder)[-2:]
        with failing.failing("read", folder / f"step_{newest}" / "shard-0-*", who_fails):
            trained = lose_ranks_and_memory(running, holder)
            running.await_more("restored", RANKS)
        assert {(each["source"], each["commits"]) for each in running.heard("restored")} == {("storage", older)}
        check_told(running, folder / f"step_{newest}", trained, who_fails)

        running.await_more("saved")  # by another holder
        holder = stop_holder(run_dir)  # it would make the folder anew
        folder.rename(run_dir / "out of sight")
        folder.write_text("in the way")
        os.kill(holder, signal.SIGCONT)
        hold.touch()
        backs = len(running.heard("restart_all"))
        kill_ranks(running)
        wait(lambda: len(running.heard("restart_all")) > backs, "the ranks are not started again")
        lose_memory(holder)
        end_holder(run_dir)
        wait(running.began_again, "no rank was started")
        os.kill(running.pids[0], signal.SIGKILL)
        run = running.end()
    assert run.code == 75, run.explain()
    assert "all ranks go on from" in run.err.rpartition("(in memory)")[0].splitlines()[-1], run.err
    (told,) = [line for line in run.err.splitlines() if "the job ends" in line]
    assert f"rank 0 was killed by signal 9 before the first step, and {folder} can't be read" in told
    assert "Traceback" not in run.err


def test_storage_that_comes_back(run_dir: Path) -> None:
    """The ranks' state is lost, and so is what was in memory, while storage is away. Found by the soak."""
    folder, away = run_dir / "checkpoints", run_dir / "out of sight"
    with job(run_dir, "--steps", "30", "--save", "2", "--pace", str(run_dir / "enough")) as running:
        running.await_more("saved", 2)
        holder = stop_holder(run_dir)
        folder.rename(away)
        folder.write_text("in the way")
        lose_ranks_and_memory(running, holder)
        wait(lambda: bool(running.heard("storage_unreadable")), "nobody has said that storage can't be read")
        folder.unlink()
        away.rename(folder)
        running.await_more("restored", RANKS)
        (run_dir / "enough").touch()
        run = running.end()
    assert run.code == 0, run.explain()
    assert {each["source"] for each in running.heard("restored")} == {"storage"}
    assert "can't be read" in run.err
