"""Why a rank's process failed, as far as its log tells: the last line of the traceback with which Python ended it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from resilient_train.exception_line import is_library, line_of

_TAIL_BYTES = 1 << 16
_UNCAUGHT = 1
"""Python's exit code after an exception that nobody caught."""
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""What torch puts in front of each line of a traceback."""
_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)')
_NOT_THE_END = ("Exception ignored", "Error in atexit", "Error in sys.excepthook")
"""Lines behind which a traceback follows that did not end the process."""
_IGNORED = "(that one)"


def how_it_failed(log: Path, code: int, others: Mapping[int, Path] | None = None) -> str:
    """What stands behind "rank N failed": the exception, the user's line that led to it, and where to read more.

    ``others``: logs of ranks whose processes still end. One whose error came first may be the last to go.
    """
    said = _exception(log) if code == _UNCAUGHT else ""
    told = how_it_fails(said, code, log)
    before = {rank: _exception(path) for rank, path in (others or {}).items()} if said else {}
    return told + "".join(f"; rank {rank} ends with {text}" for rank, text in before.items() if text not in ("", said))


def how_it_fails(said: str, code: int, log: Path) -> str:
    """The same of a process that has told it, and has not written its traceback yet."""
    return f": {said}; its traceback: {log}" if said else f" with exit code {code}; its log: {log}"


def _exception(log: Path) -> str:
    """``ValueError: text (train.py:31)``; empty if no traceback is there."""
    found, place, before = "", "", ""
    for line in _tail(log):
        frame = _FRAME.match(line)
        if line == _HEAD:
            place = _IGNORED if before.startswith(_NOT_THE_END) else ""
        elif frame is not None and place != _IGNORED:
            if not place or not is_library(frame["file"]):
                place = f"{Path(frame['file']).name}:{frame['line']}"
        elif place and line and not line.startswith(" "):
            if place != _IGNORED:
                found = line_of(line, place)
            place = ""
        before = line
    return found


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return [_PREFIX.sub("", line) for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return []
