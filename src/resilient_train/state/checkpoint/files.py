"""Files that are on storage when a call returns, and directories that vanish at once or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from resilient_train.errors import StorageError
from resilient_train.state.checkpoint.manifest import GONE
from resilient_train.state.image import BLOCK_BYTES

_WRITE_BYTES = 16 << 20
"""Per call: enough for full bandwidth, little enough to stop soon when the agent must end."""
_NO_LOCKS = frozenset({errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


@contextlib.contextmanager
def storing(what: Path | str) -> Iterator[None]:
    """Turns an OSError in its body into a StorageError about ``what``."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "no error number")
        raise StorageError(
            f"{what} could not be written: {error.strerror or error} ({name}). What there was of it is "
            "removed, older checkpoints are as they were. Look at room, quota, permissions and health of the storage"
        ) from error


def write_image(path: Path, image: memoryview, size_bytes: int) -> bool:
    """Writes the first ``size_bytes`` of ``image`` to a new file. True if past the page cache. Raises OSError.

    Direct I/O wants the memory page-aligned, and room up to the next multiple of 4096 bytes in it; where that is not
    so, or the file system refuses (EINVAL), the page cache is used.
    """
    capacity = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
    if image.nbytes >= capacity:
        with contextlib.suppress(_NotDirectError):
            _write(path, image[:capacity], size_bytes, os.O_DIRECT)
            return True
    _write(path, image[:size_bytes], size_bytes, 0)
    return False


def write_file(path: Path, content: bytes) -> None:
    """Writes a new file through to storage. Raises OSError."""
    _write(path, memoryview(content), len(content), 0)


class _NotDirectError(Exception):
    """This file system, or this memory, takes no direct I/O."""


def _write(path: Path, data: memoryview, size_bytes: int, direct: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | direct, 0o666)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            raise _NotDirectError from None
        raise
    try:
        try:
            _write_all(fd, data)
            os.ftruncate(fd, size_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)  # its error is one of writing too: NFS has none before
    except OSError as error:
        path.unlink()
        if direct and error.errno == errno.EINVAL:
            raise _NotDirectError from None
        raise


def _write_all(fd: int, data: memoryview) -> None:
    at = 0
    while at < data.nbytes:
        count = os.pwrite(fd, data[at : at + _WRITE_BYTES], at)
        if not count:
            raise OSError(errno.EIO, f"only {at} of {data.nbytes} bytes were taken")
        at += count


def sync_folder(path: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Makes a directory and those above it, durably. Raises OSError."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            each.mkdir()
        sync_folder(each.parent)


def remove(path: Path) -> None:
    """Deletes a checkpoint: it stops looking like one before its first file goes. Raises OSError."""
    if path.name.endswith(GONE):
        gone = path
    else:
        gone = path.with_name(path.name + GONE)
        _delete(gone)
        path.rename(gone)
    _delete(gone)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(fd: int, *, alone: bool) -> bool | None:
    """Locks a directory that is being written, as long as the descriptor is open. None: this file system has no locks.

    False: a living process has it. The kernel gives a dead one's lock back, so that its leftovers can be told from work
    that is under way.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def remove_leftover(path: Path, *, assume_dead: bool) -> bool:
    """Deletes what a dead process left of a checkpoint that it was writing. Raises OSError.

    False, and nothing is done, where the writer lives. ``assume_dead``: also what to do where this can't be told.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:  # a file or a symbolic link: no writer of ours made it
        remove(path)
        return True
    try:
        free = lock(fd, alone=True)
        dead = assume_dead if free is None else free
        if dead:
            remove(path)
    finally:
        os.close(fd)
    return dead
