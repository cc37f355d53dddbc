"""Storage that fails at any call: one kind of error, no leftovers, and what was there before is untouched."""

import errno
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pure.checkpoint_rig import add_files, image, names, pieces, write
from resilient_train.errors import StorageError
from resilient_train.state.checkpoint.draft import CheckpointDraft
from resilient_train.state.checkpoint.libraries import libraries_here
from resilient_train.state.checkpoint.retention import retain, tidy
from resilient_train.state.checkpoint.verify import newest_complete, verify
from resilient_train.state.image import plan_image

CALLS = ("open", "pwrite", "ftruncate", "fsync", "close", "mkdir", "rename")


class Failing:
    """Lets the ``at``-th of the calls fail; with 0, none, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, at: int, calls=CALLS) -> None:
        self.count = 0
        for name in calls:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name), number, at))

    def _wrap(self, name: str, call: Callable, number: int, at: int) -> Callable:
        def called(*args, **kwargs):
            self.count += 1
            if self.count == at:
                if name == "close":
                    call(*args)
                raise OSError(number, os.strerror(number))
            return call(*args, **kwargs)

        return called


def calls_of_a_write(folder: Path) -> int:
    write(folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        counter = Failing(patch, 0, 0)
        write(folder, 2)
        return counter.count


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_every_call_may_fail(number: int, tmp_path: Path) -> None:
    total = calls_of_a_write(tmp_path / "counted")
    assert total > 20
    for at in range(1, total):  # the last is the close that gives the lock back
        folder = tmp_path / str(at)
        write(folder, 1)
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, number, at)
            with pytest.raises(StorageError, match=errno.errorcode[number]) as caught:
                write(folder, 2)
        assert str(folder) in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)
        assert names(folder) == ["step_1"], at
        assert verify(folder / "step_1").ok, at


@pytest.mark.parametrize(("call", "times"), [("rename", 2), ("fsync", 12)])
def test_a_replacement_that_fails_loses_nothing(tmp_path: Path, call: str, times: int) -> None:
    """The renames and syncs of a second checkpoint of the same step, each failing in turn."""
    for at in range(1, times + 1):
        folder = tmp_path / str(at)
        write(folder, 1, shards=2)
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, errno.EIO, at, calls=(call,))
            with pytest.raises(StorageError):
                write(folder, 1, shards=3)
        found = newest_complete(folder)
        assert found.report is not None
        tidy(folder)
        assert newest_complete(folder).report is not None
        assert verify(folder / "step_1").ok


@pytest.mark.parametrize(("call", "at"), [("rename", 3), ("unlink", 1), ("rmdir", 1)])
def test_one_that_is_replaced_and_can_not_be_deleted(tmp_path: Path, call: str, at: int) -> None:
    """The new one is in place: its save has not failed."""
    write(tmp_path, 1, shards=2)
    with pytest.MonkeyPatch.context() as patch, CheckpointDraft.begin(tmp_path, 1) as draft:
        files = add_files(draft, 1, 3)
        Failing(patch, errno.EIO, at, calls=(call,))
        draft.commit(files, commits=1, reason="", replica_groups=[[0], [1], [2]], shards=3, libraries=libraries_here())
    assert "EIO" in draft.untidy
    assert len(names(tmp_path)) == 2
    found = newest_complete(tmp_path).report
    assert found is not None
    assert (found.path.name, found.manifest.shards) == ("step_1", 3)
    tidy(tmp_path)
    assert names(tmp_path) == ["step_1"]


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:1000], at))
    assert verify(write(tmp_path, 1)).ok


def test_a_write_that_takes_nothing_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(StorageError, match="only 0 of"):
        write(tmp_path, 1)
    assert names(tmp_path) == []


def test_somebody_elses_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(StorageError):
        write(tmp_path / "checkpoints", 1)


def test_a_joined_writer_takes_only_its_file_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointDraft.begin(tmp_path, 1) as draft:
        other = CheckpointDraft.join(draft.path)
        plan = plan_image(pieces(0, 1), 0, 1)
        Failing(monkeypatch, errno.ENOSPC, 1, calls=("pwrite",))
        with pytest.raises(StorageError):
            other.add_image(0, 1, image(plan, 1), plan.total_bytes, 0)
        assert draft.path.exists()
        assert names(draft.path) == []


def in_a_child(act: Callable[[], None]) -> None:
    """Runs it in a process of its own, for limits that cannot be lifted again."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_limit_of_the_kernel(tmp_path: Path) -> None:
    """EFBIG, of the real kernel."""
    write(tmp_path, 1)

    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(StorageError, match="EFBIG"):
            write(tmp_path, 2)

    in_a_child(act)
    assert names(tmp_path) == ["step_1"]
    assert verify(tmp_path / "step_1").ok


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mount")
def test_a_full_disk(small_disk: Path) -> None:
    with pytest.raises(StorageError, match="No space left on device"):
        for step in range(100):
            write(small_disk, step)
    assert len(names(small_disk)) >= 2
    assert all(verify(small_disk / name).ok for name in names(small_disk))
    retain(small_disk, 2)
    assert verify(write(small_disk, 100)).ok, "with room again it goes on"


def test_a_disk_that_became_read_only(small_disk: Path) -> None:
    write(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StorageError, match="Read-only file system"):
        write(small_disk, 2)
    with pytest.raises(StorageError, match="Read-only file system"):
        write(small_disk, 1)
    assert newest_complete(small_disk).report.manifest.step == 1
