"""A run directory has one launcher at a time.

Two would take each other's ranks, snapshots and checkpoints for their own. The lock is the kernel's (``flock``), so it
ends with its owner, however that ends; Linux carries it over NFS. What the file says is for people, and for file
systems that know no locks: there an owner on this machine that lives is respected, and one elsewhere can't be seen.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from resilient_train.errors import ConfigError

LOCK = "agent-0.lock"
_MOMENT_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Owner(msgspec.Struct, frozen=True):
    """The launcher that a run directory belongs to."""

    pid: int
    host: str
    boot_id: str

    def lives_here(self) -> bool:
        """Whether it is seen to run on this machine."""
        return self.boot_id == _boot_id() and Path(f"/proc/{self.pid}").exists()


class Claim:
    """This process's claim to a run directory, for as long as it lives, or until ``close``."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError, which names the owner, if the directory has one; OSError if it can't be written.

        ``locked`` is False where the file system knows no locks: a launcher on another machine would not be noticed.
        """
        self._path = run_dir / LOCK
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.locked = True
        try:
            self._take(run_dir)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, run_dir: Path) -> None:
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a holder that looks whether there is a launcher has it for a moment
                time.sleep(_MOMENT_S)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(_told(run_dir, self._read())) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.locked = False
            owner = self._read()
            if owner is not None and owner.pid != os.getpid() and owner.lives_here():
                raise ConfigError(_told(run_dir, owner)) from None
        self._write(msgspec.json.encode(Owner(os.getpid(), socket.gethostname(), _boot_id())))

    def _read(self) -> Owner | None:
        try:
            return msgspec.json.decode(os.pread(self._descriptor, 4096, 0), type=Owner)
        except msgspec.MsgspecError:  # its owner is just about to write it
            return None

    def _write(self, data: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)

    def close(self) -> None:
        """Gives the directory back. The file stays: to delete it would let two in at once."""
        with contextlib.suppress(OSError):  # what it says is worth nothing without the lock
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def _told(run_dir: Path, owner: Owner | None) -> str:
    who = f"process {owner.pid} on {owner.host}" if owner is not None else "another process"
    return (
        f"{run_dir} belongs to another launcher that still runs ({who}): wait for its end, end it, or choose another "
        "--run-dir"
    )


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
