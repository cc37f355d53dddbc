"""Per-rank logs: each process writes to files of its own, and the agent shows what is new in them on the console.

Files and not pipes: a pipe whose reader is busy blocks the training, one whose reader died kills it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from string import Template
from typing import NamedTuple

from resilient_train.launch.job import Job

_CHUNK_BYTES = 1 << 20


class Streams(NamedTuple):
    """Open descriptors for a process's stdout and stderr; the caller closes them when the process has them."""

    out: int
    err: int


class _Follower:
    """One log file being shown."""

    def __init__(self, path: Path, target: int, prefix: bytes) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._target = target
        self._prefix = prefix
        self._partial = b""

    def show_new(self, *, final: bool = False) -> None:
        while data := os.read(self._descriptor, _CHUNK_BYTES):
            self._show(data)
        if final and self._partial:
            self._write(self._prefix + self._partial + b"\n")
            self._partial = b""

    def _show(self, data: bytes) -> None:
        if not self._prefix:
            self._write(data)
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # `| head` must not end a training run
            while data:
                data = data[os.write(self._target, data) :]

    def close(self) -> None:
        self.show_new(final=True)
        os.close(self._descriptor)


class Logs:
    """All logs of a node. ``show_new`` is called every now and then by the agent's loop."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._followers: dict[tuple[int, int], list[_Follower]] = {}

    def open(self, rank: int, incarnation: int) -> Streams:
        """Opens ``logs/rank_<r>/<incarnation>.{out,err}`` for a process that is about to start."""
        folder = self.folder(rank)
        folder.mkdir(parents=True, exist_ok=True)
        descriptors = []
        followers = []
        for name, suffix, target in (("stdout", "out", sys.stdout), ("stderr", "err", sys.stderr)):
            path = folder / f"{incarnation}.{suffix}"
            descriptors.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
            if (rank, name) not in self._job.quiet:
                prefix = self._prefix(rank) if (rank, name) in self._job.prefixed else b""
                followers.append(_Follower(path, target.fileno(), prefix))
        self._followers[rank, incarnation] = followers
        return Streams(*descriptors)

    def folder(self, rank: int) -> Path:
        """Where the logs of a rank lie."""
        return self._job.log_dir / f"rank_{rank}"

    def _prefix(self, rank: int) -> bytes:
        values = {"role_name": self._job.role, "rank": rank, "local_rank": rank}
        return Template(self._job.log_prefix).safe_substitute(values).encode()

    def show_new(self) -> None:
        """Shows what the processes have written since the last call."""
        for followers in self._followers.values():
            for follower in followers:
                follower.show_new()

    def close(self, rank: int, incarnation: int) -> None:
        """The process has ended: shows the rest."""
        for follower in self._followers.pop((rank, incarnation), []):
            follower.close()
