"""Storage that is full, failing, read-only, gone or slow while a job saves: it trains on, and keeps what it has.

One job meets one trouble after the other. It goes slowly meanwhile, and then at full speed to its end.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from failing_storage import FailingStorage
from running import Reference, Run, launch
from test_saving_kills import STEPS
from watched_jobs import RANKS, Job, end_holder, holder_pid, job, steps_of, stop, wait, wrongs

EVERY, KEPT = 2, 2


@contextlib.contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", *arguments, folder], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True, timeout=60)


@contextlib.contextmanager
def between_saves(folder: Path, running: Job) -> Iterator[None]:
    """The holder stands still, and has nothing half written or still to be deleted: no file of its is open, a draft
    that it could not take away does not stay, and what is full now does not get room again.
    """
    pid = holder_pid(running.run_dir)

    def stands() -> bool:
        stop(pid)
        if list(folder.glob("*_tmp")) or len(steps_of(folder)) > KEPT:
            os.kill(pid, signal.SIGCONT)
            return False
        return True

    wait(stands, "it saves all the time")
    yield
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def full(folder: Path, running: Job) -> Iterator[None]:
    path = folder / "of another"
    with between_saves(folder, running), contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    yield
    path.unlink()


@contextlib.contextmanager
def read_only(folder: Path, running: Job) -> Iterator[None]:
    with between_saves(folder, running):
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True, timeout=60)
    yield
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True, timeout=60)


@contextlib.contextmanager
def limited(_: Path, running: Job) -> Iterator[None]:
    pid, none = holder_pid(running.run_dir), resource.RLIM_INFINITY
    # Behind EFBIG comes SIGXFSZ, which ends who does not ignore it.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (16384, none))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (none, none))


@contextlib.contextmanager
def replaced(folder: Path, running: Job) -> Iterator[None]:
    """There is something at each moment: where there is nothing, the holder makes a folder."""
    link = running.run_dir / "checkpoints"
    aside, other = link.with_name("aside"), link.with_name("other")
    aside.write_text("in the way")
    with between_saves(folder, running):
        aside.rename(link)
    yield
    other.symlink_to(folder)
    other.rename(link)


@contextlib.contextmanager
def stopped(_: Path, running: Job) -> Iterator[None]:
    """As the holder is where a write does not come back, or memory is short."""
    pid = holder_pid(running.run_dir)
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def frozen(folder: Path, _: Job) -> Iterator[None]:
    """Every write waits, and so does whoever writes: ranks and launcher must not."""
    subprocess.run(["fsfreeze", "-f", folder], check=True, timeout=60)
    yield
    subprocess.run(["fsfreeze", "-u", folder], check=True, timeout=60)


Trouble = Callable[[Path, Job], AbstractContextManager[None]]
TROUBLES: list[tuple[Trouble, str, str]] = [
    (full, "save_failed", "ENOSPC"),
    (read_only, "save_failed", "EROFS"),
    (limited, "save_failed", "EFBIG"),
    (replaced, "save_failed", "ENOTDIR"),
    (stopped, "save_skipped", "busy"),
]
DYING = [("write", "/*"), ("sync-folder", ""), ("sync", "/*"), ("sync-folder", "/*")]
"""What fails with EIO, and where in the folder of the checkpoints: itself it is synced behind the rename."""


def meet(trouble: AbstractContextManager[None], kind: str, reason: str, folder: Path, running: Job) -> None:
    """The job has just saved; it does not, and says why; it does again."""
    with trouble:
        seen = len(running.heard(kind))
        running.await_more(kind)
        told = running.heard(kind)[seen:]
        assert any(reason in each["reason"] and each["step"] % EVERY == 0 for each in told), told
        saved = [each["step"] for each in running.heard("saved")]
        assert not wrongs(folder, saved), f"{told}: the last good checkpoints did not stay"
        drafts = [folder / f"step_{each['step']}_tmp" for each in told]  # that of the next save may be there
        assert not any(draft.exists() for draft in drafts), f"{told}: half a checkpoint stays"
    running.await_more("saved")


def to_the_end(running: Job, reference: Reference) -> Run:
    (running.run_dir / "fast").touch()
    run = running.end()
    assert run.code == 0, run.explain()
    assert run.digests() == reference(ranks=RANKS, steps=STEPS).digests(), run.explain()
    return run


@contextlib.contextmanager
def slow_job(run_dir: Path, folder: Path, **environ: str) -> Iterator[Job]:
    """It saves into ``folder`` by way of a symbolic link, which can be replaced where a mount can't."""
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(folder)
    try:
        slowly = ("--steps", str(STEPS), "--save", str(EVERY), "--pace", str(run_dir / "fast"))
        with job(run_dir, *slowly, **environ) as running:
            yield running
    finally:
        end_holder(run_dir)


@pytest.mark.slow
def test_one_trouble_after_the_other(run_dir: Path, tmp_path: Path, undisturbed: Reference) -> None:
    folder, dying = tmp_path / "small", FailingStorage(tmp_path)
    small = mounted(folder, "-t", "tmpfs", "-o", "size=4m", "none")
    with small, slow_job(run_dir, folder, **dying.environ) as running:
        running.await_more("saved")
        for trouble, kind, reason in TROUBLES:
            meet(trouble(folder, running), kind, reason, folder, running)
        for calls, where in DYING:
            meet(dying.failing(calls, f"{folder}{where}"), "save_failed", "EIO", folder, running)
        lost = len(running.heard("holder_lost"))
        end_holder(run_dir)
        wait(lambda: len(running.heard("holder_lost")) > lost, "the holder's end was not told")
        running.await_more("saved")  # another holder, another writer
        run = to_the_end(running, undisturbed)
        assert not wrongs(folder, [each["step"] for each in running.heard("saved")])
    told = [line for line in run.err.splitlines() if "not written" in line]
    names = [reason for _, kind, reason in TROUBLES if kind == "save_failed"] + ["EIO"] * len(DYING)
    assert all(name in line for name, line in zip(names, told, strict=False)), run.err
    assert len(names) <= len(told) <= len(names) + 2, "once each; and what the holder was writing when it died"
    assert run.err.count("still busy") == run.err.count("skipped") > 0, run.err


@pytest.mark.long  # needs loop devices
def test_frozen_disk(run_dir: Path, tmp_path: Path, undisturbed: Reference) -> None:
    if not shutil.which("mkfs.ext4") or not shutil.which("fsfreeze"):
        pytest.skip("no mkfs.ext4, no fsfreeze")
    image, folder = tmp_path / "image", tmp_path / "folder"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=60)
    with mounted(folder, "-o", "loop", str(image)), slow_job(run_dir, folder) as running:
        running.await_more("saved")
        meet(frozen(folder, running), "save_skipped", "busy", folder, running)
        to_the_end(running, undisturbed)
        assert not wrongs(folder, [each["step"] for each in running.heard("saved")])


def test_unreadable_checkpoints_are_not_trained_over(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("in the way")
    refused = launch(run_dir, "train.py", "--steps", "1", "--save", "1", ranks=1)
    assert refused.code == 2, refused.explain()
    assert "can't be read" in refused.err
    assert "Traceback" not in refused.err
