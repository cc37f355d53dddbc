"""What a job tells the benchmark: lines of JSON in a file of its rank's. Light, so that it can be the first import."""

from __future__ import annotations

import time

FIRST_LINE_NS = time.time_ns()  # before torch is imported, which is most of a process's start

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402


class Arguments(NamedTuple):
    """The command line of every job."""

    model: str
    folder: Path
    options: dict[str, Any]
    """What the system is set to, where that is done in the script."""


def arguments() -> Arguments:
    """Reads the command line, and sees to it that this process ends even if whoever should end it is gone."""
    model, folder, limit_s, options = sys.argv[1:]
    signal.alarm(int(limit_s))
    return Arguments(model, Path(folder), json.loads(options))


class Journal:
    """One line is one write(2): a killed process leaves whole lines, apart from the last at worst."""

    def __init__(self, folder: Path, slot: int) -> None:
        path = folder / f"journal{slot}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pid = os.getpid()
        self.mark("first_line", FIRST_LINE_NS)
        self.mark("imported")

    def mark(self, name: str, time_ns: int = 0) -> None:
        """A place that a process passes on its way to its first step."""
        line = {"mark": name, "time_ns": time_ns or time.time_ns(), "pid": self._pid}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def committed(self, step: int) -> None:
        """This rank has applied the update of this step."""
        line = b'{"step": %d, "time_ns": %d, "pid": %d}\n' % (step, time.time_ns(), self._pid)
        os.write(self._descriptor, line)

    def digest(self, step: int, digest: int) -> None:
        """What the parameters are after this step."""
        os.write(self._descriptor, b'{"after": %d, "digest": %d}\n' % (step, digest))
