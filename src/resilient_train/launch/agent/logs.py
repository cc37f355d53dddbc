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

from resilient_train.launch.agent.console import Console
from resilient_train.launch.spec import JobSpec
from resilient_train.observe.sinks import ASIDE

_CHUNK_BYTES = 1 << 16
_LAST_S = 1.0
SHOW_EVERY_S = 0.05
"""How often an agent calls ``Logs.show_new``."""
SCHEDULER = -1
"""In the place of a rank: MindSpore's scheduler."""


class Streams(NamedTuple):
    """Open descriptors for a process's stdout and stderr; the caller closes them when the process has them."""

    out: int
    err: int


class _Follower:
    """One log file being shown, from its end: runs before this one in the same directory have shown the rest."""

    def __init__(self, path: Path, target: Console, prefix: bytes, only: bytes) -> None:
        """``only``: what is shown begins so, in each line that has it."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(self._descriptor, 0, os.SEEK_END)
        self._target = target
        self._prefix, self._only = prefix, only
        self._partial = b""

    def show_new(self) -> bool:
        """Shows what the console takes now. True: that was all that there is at the moment, or that can be read."""
        while not self._target.behind:
            try:
                data = os.read(self._descriptor, _CHUNK_BYTES)
            except OSError:  # the storage that it lies on is gone; the rank is not
                return True
            if not data:
                return True
            self._show(data)
        return False

    def _show(self, data: bytes) -> None:
        if not (self._prefix or self._only):
            self._target.write(data)
            return
        # Each state of a progress bar is a line, as torchrun has it: the bar shows at once, and nothing piles up here.
        lines = (self._partial + data).splitlines(keepends=True)
        self._partial = b"" if lines[-1].endswith(b"\n") else lines.pop()  # one that ends with \r may go on with \n
        if self._only:  # dots, say: of what is not shown nothing is kept
            begin = self._partial.find(self._only)
            self._partial = self._partial[begin if begin >= 0 else -len(self._only) :]
        self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        shown = (line[line.index(self._only) :] for line in lines if self._only in line)
        self._target.write(b"".join(self._prefix + line.rstrip(b"\r\n") + b"\n" for line in shown))

    def close(self) -> None:
        """Shows a last line that has no end."""
        if self._partial:
            self._write([self._partial])
        os.close(self._descriptor)

    def finish(self) -> None:
        """Shows the rest, waiting for a console that is slow, but not for one that is stopped."""
        self._target.drain(_LAST_S)
        while not (self._target.behind or self.show_new()):
            self._target.drain(_LAST_S)
        self.close()


class Logs:
    """All logs of a node. ``show_new`` is called every now and then by the agent's loop."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._followers: dict[tuple[int, int], list[_Follower]] = {}
        self._ended: list[_Follower] = []
        self._out, self._err = Console(sys.stdout.fileno()), Console(sys.stderr.fileno())

    def open(self, rank: int, incarnation: int) -> Streams:
        """Opens ``logs/rank_<r>/<incarnation>.{out,err}`` for a process that is about to start.

        Where that can't be done (no room, no such storage any more) it starts all the same, and its words are lost.
        """
        followers: list[_Follower] = []
        self._followers[rank, incarnation] = followers
        out = self._open(rank, incarnation, "stdout", self._out, followers)
        try:
            return Streams(out, self._open(rank, incarnation, "stderr", self._err, followers))
        except OSError:
            os.close(out)
            raise

    def _open(self, rank: int, incarnation: int, name: str, target: Console, followers: list[_Follower]) -> int:
        path = self.folder(rank) / f"{incarnation}.{name.removeprefix('std')}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            self.say(f"resilient-run: what rank {rank} says on {name} is lost: {path}: {error}")
            return nothing
        # Lines that say what became of the training are for whoever looks at the console, whatever else stays off it.
        only = ASIDE.encode() if (rank, name) in self._job.quiet else b""
        if name == "stderr" or not only:
            prefix = self._prefix(rank) if (rank, name) in self._job.prefixed else b""
            with contextlib.suppress(OSError):  # it is in the file all the same
                followers.append(_Follower(path, target, prefix, only))
        return descriptor

    def folder(self, rank: int) -> Path:
        """Where the logs of a rank lie."""
        return self._job.log_dir / ("scheduler" if rank == SCHEDULER else f"rank_{rank}")

    def _prefix(self, rank: int) -> bytes:
        values = {"role_name": self._job.role, "rank": rank, "local_rank": rank}
        return Template(self._job.log_prefix).safe_substitute(values).encode()

    def show_new(self) -> None:
        """Shows what the processes have written since the last call."""
        self._out.flush()
        self._err.flush()
        for followers in self._followers.values():
            for follower in followers:
                follower.show_new()
        for follower in self._ended.copy():
            if follower.show_new():
                follower.close()
                self._ended.remove(follower)

    def say(self, text: str) -> None:
        """A line of the agent's own, on standard error."""
        self._err.say(text)

    def close(self, rank: int, incarnation: int) -> None:
        """The process has ended, so nothing more will be written."""
        self._ended += self._followers.pop((rank, incarnation), [])

    def finish(self) -> None:
        """The job has ended: shows the rest."""
        for follower in (*self._ended, *(each for followers in self._followers.values() for each in followers)):
            follower.finish()
        for console in (self._out, self._err):
            console.drain(_LAST_S)
        self._ended.clear()
        self._followers.clear()
