"""Whether gloo's threads have come to rest: then none of them writes anything any more.

A recovery leaves a collective when nothing of it can still write into gradients. Most end with an error as soon as the
connections are shut. One that gloo has forgotten (``guarded_works.py``) never ends; one that is slow (it adds up what
had come) ends later. What tells them apart is what the kernel says of the threads: the forgotten one sleeps, and nobody
is left who would wake it. So three things together are enough, and each can be seen:

* nothing comes by any connection any more, and all that had come is read;
* the threads that read sleep. They wake up each 10 ms to see whether they are to end, and find nothing then;
* the threads that compute sleep, and have not been awake for a while; those of ours too that wait for gloo, and then
  copy what has come (``copies``).

Something may have come that no collective takes any more. Then a thread that reads is told of it by the kernel again
and again, and never sleeps: it has run for a while, and has read nothing.

A time alone does not do: a second may be too short on a busy machine, and is long where nobody is awake. So where that
does not come about, it is a long time while somebody is awake, who may be gloo's thread for another group that goes on.
All times are counted in looks: while the machine stands still (a virtual one; a stopped process) nobody can be awake.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_READS, _COMPUTES = "gloo_tcp_loop", "pt_gloo_runloop"
"""As torch 2.13 names the threads."""
COPIES = "rt-wait-message"
_LOOK_S = 0.004
_STILL_S = 0.02
"""A thread that waits for the GIL to hand its result on wakes up each 5 ms."""
_SPUN_S = 0.02
"""Of processor time: a thread that has had so much, and has read nothing, does not wait for its turn."""
_UNKNOWN_S = 0.25
"""Where no thread has such a name: another torch, or no gloo."""
_UNREAD_S = 1.0
"""Nobody is awake who would do anything, and something may come yet, or is not read."""
_AWAKE_S = 10.0
"""Somebody is."""
_TICKS = os.sysconf("SC_CLK_TCK")
"""The kernel's unit of processor time, by the second: user's and system's stand in two fields of ``stat``."""


class _Threads(NamedTuple):
    """Gloo's, in this process. ``computes``: how often each was awake; ``reads``: for how many seconds those have run
    that do not sleep.
    """

    computes: dict[str, tuple[str, str]]
    reads: dict[str, float]
    some: bool
    """Any at all."""


class AtRest:
    """To be asked again and again. ``unread``: bytes by connection that have come and are not read; None: more may
    come. gloo closes a connection behind that, as a rule. ``left``: threads of groups that were left before, which had
    come to rest; each forgotten collective keeps some of them until the process ends.
    """

    def __init__(self, unread: Callable[[], tuple[int, ...] | None], left: Mapping[str, str] | None = None) -> None:
        self._unread, self._left = unread, left or {}
        self._seen: object = None
        self._ran_s: dict[str, float] = {}
        """What the threads that read had run when something was seen for the last time."""
        self._looked_s = time.monotonic()
        self._waited_s = self._quiet_s = 0.0

    def __call__(self) -> bool:
        since_s = time.monotonic() - self._looked_s
        if since_s < _LOOK_S:
            return False
        self._looked_s += since_s
        since_s = min(since_s, 2 * _LOOK_S)
        self._waited_s += since_s
        unread, threads = self._unread(), _look(self._left)  # what was read before they were looked at has woken one
        seen = None if threads is None else (unread, threads.computes)
        if threads is None or seen != self._seen:
            self._seen, self._ran_s, self._quiet_s = seen, {}, 0.0
            return self._waited_s >= _AWAKE_S
        asleep, spin = not threads.reads, self._spin(threads.reads)
        self._quiet_s = self._quiet_s + since_s if asleep or spin else 0.0
        known = unread is not None and (spin if any(unread) else asleep)
        needed_s = (_STILL_S if threads.some else _UNKNOWN_S) if known else _UNREAD_S
        return self._quiet_s >= needed_s or self._waited_s >= _AWAKE_S

    def _spin(self, reads: dict[str, float]) -> bool:
        """Those that read have run for a while, and nothing was read."""
        ran_s = [now_s - self._ran_s.setdefault(name, now_s) for name, now_s in reads.items()]
        return bool(ran_s) and min(ran_s) >= _SPUN_S


def copies() -> None:
    """Gives this thread a name by which it is known that it writes behind gloo's end. Python names its own only."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(COPIES)


def gloos_threads() -> dict[str, str]:
    """That there are now: the kernel's number, which another thread may have later, and when it began."""
    return {task.name: _began(task) for task in _tasks() if _name_of(task) in (_READS, _COMPUTES, COPIES)}


def _tasks() -> Iterator[Path]:
    return Path("/proc/self/task").iterdir()


def _name_of(task: Path) -> str:
    """Empty: it has ended."""
    try:
        return (task / "comm").read_text().rstrip("\n")
    except OSError:
        return ""


def _numbers(task: Path) -> list[str]:
    """What ``stat`` says behind the name. Empty: it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _began(task: Path) -> str:
    return "".join(_numbers(task)[19:20])


def _look(left: Mapping[str, str]) -> _Threads | None:
    """None: one that computes is awake, or one has just ended."""
    found = _Threads({}, {}, some=False)
    try:
        for task in _tasks():
            name = _name_of(task)
            if name not in (_READS, _COMPUTES, COPIES) or (task.name in left and left[task.name] == _began(task)):
                continue
            found = found._replace(some=True)
            told = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            asleep = told["State"].strip().startswith("S")
            if name != _READS:
                if not asleep:
                    return None
                found.computes[task.name] = told["voluntary_ctxt_switches"], told["nonvoluntary_ctxt_switches"]
            elif not asleep:
                found.reads[task.name] = sum(map(int, _numbers(task)[11:13])) / _TICKS
    except OSError:
        return None
    return found
