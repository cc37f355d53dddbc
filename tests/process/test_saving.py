"""State that outlives the processes: all ranks are lost, or the agent, or the holder too, and the training goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from running import Reference, Run, launch, read_events, start
from saved_jobs import RANKS, STEPS, command, kill_together, pid_of, wait_for, wait_for_step
from watched_jobs import end_holder, gone, holder_pid, recorded, stop, wait

from resilient_train.state.checkpoint.verify import verify

SAVING = ("--save", "4")
IN_TIME = (*SAVING, "--await-saves")
"""However slow storage is, a job does not come to its end before it has saved."""


def cut(run_dir: Path, awaited: str = "saved", times: int = 2, *, before: int = STEPS) -> None:
    """Runs the job until there were so many of these events, and kills the launcher; its ranks die with it.

    ``before``: it comes to the end of no step from this one on, and so saves nothing from behind it.
    """
    (run_dir / "events.jsonl").unlink(missing_ok=True)  # a launcher before this one wrote these
    held = ("--pace", str(run_dir / "never"), "--hold-in", str(before - 1))
    with start(command(run_dir, *IN_TIME, *held)) as process:
        wait_for(run_dir, process, awaited, times)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def go_on(run_dir: Path) -> Run:
    return launch(run_dir, "train.py", "--steps", str(STEPS), *SAVING, ranks=RANKS)


def test_saving_changes_nothing(run_dir: Path, undisturbed: Reference) -> None:
    run = go_on(run_dir)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests()
    saved = [event["detail"]["step"] for event in run.of("saved")]
    left_out = {event["detail"]["step"] for event in run.of("save_skipped")}  # storage may be slower than the job
    assert sorted([*saved, *left_out]) == [*range(4, STEPS, 4)], run.explain()
    assert saved, run.explain()
    kept = [f"step_{step}" for step in saved[-2:]]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == sorted(kept)
    assert all(verify(run_dir / "checkpoints" / name).ok for name in kept)


def test_one_rank_without_memory_for_snapshots(run_dir: Path, undisturbed: Reference) -> None:
    arguments = ("--steps", str(STEPS), "--variant", "poor", *SAVING)
    run = launch(run_dir, "train.py", *arguments, ranks=RANKS)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests()
    off = {event["rank"]: event["detail"] for event in run.of("save_off")}
    assert off[1] == {"reason": "900 MB are missing"}
    assert {rank: "follows" in detail for rank, detail in off.items()} == {0: True, 1: False, 2: True}
    assert run.err.count("saves nothing any more") == 1, run.err
    assert not run.of("saved") + run.of("save_skipped"), run.explain()


@pytest.mark.shows("DDP", "no holder left", "back")
@pytest.mark.parametrize("holder", ["runs", pytest.param("is stopped", marks=pytest.mark.long), "is lost too"])
def test_all_ranks_lost_at_once_go_on_from_memory(run_dir: Path, undisturbed: Reference, holder: str) -> None:
    """A holder that does not answer is waited for: to begin anew, or from an older state, may cost days. What one that
    dies with all ranks held, the agent gives to the next.
    """
    pace = run_dir / "fast"
    with start(command(run_dir, *IN_TIME, "--pace", str(pace))) as process:
        wait_for(run_dir, process, "saved", 2)
        pids = [event["detail"]["pid"] for event in read_events(run_dir) if event["kind"] == "spawned"]
        stop(process.pid)  # the agent could replace the first one before the others die
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait(lambda: all(map(gone, pids)), "killed ranks live on")
        trained = recorded(run_dir, RANKS)
        holding = holder_pid(run_dir)
        if holder == "is stopped":
            stop(holding)
        if holder == "is lost too":
            end_holder(run_dir)
        os.kill(process.pid, signal.SIGCONT)
        try:
            if holder == "is stopped":
                wait_for(run_dir, process, "holder_silent")
        finally:  # a stopped process would outlive the test
            if holder == "is stopped":
                os.kill(holding, signal.SIGCONT)
        pace.touch()
        out, err = process.communicate(timeout=100)
    run = Run(run_dir, process.returncode, out, err, read_events(run_dir))
    assert run.code == 0, run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {"memory"}, run.explain()
    (back,) = run.of("restart_all")
    assert trained <= back["detail"]["commits"] <= trained + 1, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests(), run.explain()


@pytest.mark.shows("DDP", "started again", "goes on")
def test_one_loss_after_the_other(run_dir: Path, undisturbed: Reference) -> None:
    """Of a launcher, which costs nothing; of the holder too; and of the newest checkpoint."""
    cut(run_dir, before=12)
    cut(run_dir, "restored", RANKS, before=12)
    assert restored(run_dir) == {"memory"}
    end_holder(run_dir)
    cut(run_dir, "saved", 1)
    assert restored(run_dir) == {"storage"}
    end_holder(run_dir)
    newest = damage_newest(run_dir)
    run = go_on(run_dir)
    assert run.code == 0, run.explain()
    assert restored(run_dir) == {"storage"}, run.explain()
    assert str(newest) in {event["detail"]["path"] for event in run.of("checkpoint_skipped")}
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests(), run.explain()


def test_what_is_in_memory_alone_comes_to_storage(run_dir: Path, undisturbed: Reference) -> None:
    """By the holder, which nobody comes to any more; and by a launcher that is asked to end when no rank is left."""
    in_memory = ("--save-mode", '{"steps": 400, "memory_steps": 2}', "--pace", str(run_dir / "fast"))
    with start(command(run_dir, *in_memory)) as process:
        wait_for_step(run_dir, 7)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    holding = holder_pid(run_dir)
    os.kill(holding, signal.SIGTERM)  # it has no grace time then
    wait(lambda: gone(holding), "the holder did not end")
    first = saved_steps(run_dir)
    assert len(first) == 1
    assert first[0] >= 4
    (run_dir / "events.jsonl").unlink()

    with start(command(run_dir, *in_memory)) as process:
        wait_for(run_dir, process, "started")
        assert restored(run_dir) == {"storage"}
        wait_for_step(run_dir, first[0] + 8)
        kill_together(process, [pid_of(run_dir, rank) for rank in range(RANKS)])
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        _, err = process.communicate(timeout=60)
    later = saved_steps(run_dir)
    assert process.returncode == 143, err
    assert len(later) == 2, err
    assert later[-1] > first[0] + 4, err
    assert f"goes on from update {later[-1]} ({run_dir}/checkpoints/step_{later[-1]})" in err, err

    run = go_on(run_dir)
    assert run.code == 0, run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {"storage"}, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests(), run.explain()


def test_another_number_of_ranks_has_what_was_in_memory_alone(run_dir: Path) -> None:
    """It comes to storage first. Where it can't, nobody begins beside it."""
    in_memory = ("--save-mode", '{"steps": 400, "memory_steps": 2}', "--pace", str(run_dir / "fast"))
    with start(command(run_dir, *in_memory)) as process:
        wait_for_step(run_dir, 7)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    (run_dir / "fast").touch()
    (run_dir / "checkpoints").write_text("in the way")
    refused = launch(run_dir, "train.py", "--steps", str(STEPS), *in_memory, ranks=RANKS - 1)
    assert refused.code == 2, refused.explain()
    assert f"start {RANKS} ranks, or end its holder (kill {holder_pid(run_dir)})" in refused.err, refused.explain()
    assert not refused.of("started")
    (run_dir / "checkpoints").unlink()
    run = launch(run_dir, "train.py", "--steps", str(STEPS), *in_memory, ranks=RANKS - 1)
    assert run.code == 0, run.explain()
    (step,) = saved_steps(run_dir)
    assert step >= 4
    assert f"memory has update {step} of {RANKS} ranks: it is written to storage first" in run.err, run.explain()
    assert [event["detail"]["step"] for event in run.of("started")] == [step], run.explain()
    assert len({digest for digest, _ in run.digests().values()}) == 1


def test_a_holder_lost_when_all_come_for_what_it_has(run_dir: Path, undisturbed: Reference) -> None:
    """That they can't reach it says nothing of the state."""
    in_memory = ("--save-mode", '{"steps": 400, "memory_steps": 2}', "--pace", str(run_dir / "fast"))
    hold = run_dir / "hold"
    with start(command(run_dir, *in_memory, "--hold", str(hold))) as process:
        wait_for_step(run_dir, 7)
        hold.touch()
        holding = holder_pid(run_dir)
        kill_together(process, [pid_of(run_dir, rank) for rank in range(RANKS)])
        os.kill(process.pid, signal.SIGCONT)
        wait_for(run_dir, process, "restart_all")
        os.kill(holding, signal.SIGKILL)
        wait(lambda: gone(holding), "the holder did not end")
        hold.unlink()
        (run_dir / "fast").touch()
        out, err = process.communicate(timeout=60)
    run = Run(run_dir, process.returncode, out, err, read_events(run_dir))
    assert run.code == 0, run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {"memory"}, run.explain()
    assert len(run.of("restart_all")) == 2, run.explain()
    assert "begin anew" not in run.err, run.explain()
    assert run.digests() == undisturbed(ranks=RANKS, steps=STEPS).digests(), run.explain()


def saved_steps(run_dir: Path) -> list[int]:
    """All of which are whole."""
    found = sorted((run_dir / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    assert all(verify(path).ok for path in found), found
    return [int(path.name.removeprefix("step_")) for path in found]


def restored(run_dir: Path) -> set[str]:
    """From where the last launcher's ranks had their state when they began."""
    return {event["detail"]["source"] for event in read_events(run_dir, torn=True) if event["kind"] == "restored"}


def damage_newest(run_dir: Path) -> Path:
    """Turns one bit of the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    shard = next(newest.glob("shard-0-*"))
    with shard.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        byte = file.read(1)
        file.seek(-8, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    return newest
