"""What the kernel knows of processes that seem to stand still: whether they compute, read or write.

A rank that compiles, evaluates or saves for an hour tells nobody so, but it uses a processor or moves bytes. One that
hangs does neither. Not seen: a loop that computes for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_WINDOW_MS = 1000
_SHARE = 0.1
"""Of one processor. Threads that wait for an order, or look after a file now and then, use less."""
_BYTES_S = 64 << 10
_TICK_MS = 10
"""USER_HZ is 100 wherever Linux runs."""


class Used(NamedTuple):
    """By a process and all that it has started: of processors; by itself: bytes moved, and whether it waits for storage
    (state D).
    """

    cpu_ms: int
    moved_bytes: int
    in_storage: bool


class Work:
    """``look`` is called again and again with the processes of all ranks, by rank, while nothing moves. ``limit_ms``:
    who has not worked for so long may be given up.
    """

    def __init__(self, limit_ms: int, read: Callable[[Collection[int]], Mapping[int, Used]] | None = None) -> None:
        self._read = read or read_used
        self._window_ms = min(_WINDOW_MS, limit_ms / 3)
        self._last: Mapping[int, Used] = {}
        self._last_ms = 0.0
        self._worked_ms: dict[int, float] = {}

    def look(self, now_ms: float, pids: Mapping[int, int]) -> None:
        """Reads ``/proc``, once a second."""
        if now_ms - self._last_ms < self._window_ms:
            return
        used = self._read(pids.values())
        for rank, pid in pids.items():
            before, now = self._last.get(pid), used.get(pid)
            if before is None or now is None or _works(before, now, now_ms - self._last_ms):
                self._worked_ms[rank] = now_ms
        self._last, self._last_ms = used, now_ms

    def forget(self, now_ms: float) -> None:
        """The job goes on: nobody is asked for."""
        self._last, self._worked_ms, self._last_ms = {}, {}, now_ms

    def idle_ms(self, rank: int, now_ms: float) -> float:
        """How long this rank has not worked, as far as it was looked at."""
        return now_ms - self._worked_ms.get(rank, now_ms)


def _works(before: Used, now: Used, elapsed_ms: float) -> bool:
    computes = now.cpu_ms - before.cpu_ms >= _SHARE * elapsed_ms
    moves = now.moved_bytes - before.moved_bytes >= _BYTES_S * elapsed_ms / 1000
    return computes or moves or now.in_storage


def read_used(leaders: Collection[int]) -> dict[int, Used]:
    """Of the process groups with these leaders."""
    cpu_ms = dict.fromkeys(leaders, 0)
    states = {}
    for pid, state, group, ticks in _processes():
        if group in cpu_ms:
            cpu_ms[group] += ticks * _TICK_MS
        if pid in cpu_ms:
            states[pid] = state
    return {pid: Used(cpu_ms[pid], _moved(pid), state == "D") for pid, state in states.items()}


def _processes() -> Iterator[tuple[int, str, int, int]]:
    """Number, state, group and ticks of each process (proc_pid_stat(5))."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        yield int(folder.name), words[0], int(words[2]), int(words[11]) + int(words[12])


def _moved(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
