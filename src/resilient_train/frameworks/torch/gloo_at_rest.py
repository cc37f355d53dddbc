"""Whether gloo's threads have come to rest: then none of them writes anything any more.

A recovery leaves a collective when nothing of it can still write into gradients. Most end with an error as soon as the
connections are shut. One that gloo has forgotten (``guarded_works.py``) never ends; one that is slow (it adds up what
had come) ends later. What tells them apart is what the kernel says of the threads: the forgotten one sleeps, and nobody
is left who would wake it. So three things together are enough, and each can be seen:

* nothing comes by any connection any more, and all that had come is read;
* the threads that read sleep. They wake up each 10 ms to see whether they are to end, and find nothing then;
* the threads that compute sleep, and have not been awake for a while.

A time alone does not do: a second may be too short on a busy machine, and is long where nobody is awake. So where that
does not come about, it is a long time while somebody is awake, who may be gloo's thread for another group that goes on.
All times are counted in looks: while the machine stands still (a virtual one; a stopped process) nobody can be awake.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_READS, _COMPUTES = "gloo_tcp_loop", "pt_gloo_runloop"
"""As torch 2.13 names the threads."""
_LOOK_S = 0.004
_STILL_S = 0.02
"""A thread that waits for the GIL to hand its result on wakes up each 5 ms."""
_UNKNOWN_S = 0.25
"""Where no thread has such a name: another torch, or no gloo."""
_UNREAD_S = 1.0
"""All sleep, and something has come that nobody reads."""
_AWAKE_S = 10.0
_Threads = dict[str, tuple[str, ...]]


class AtRest:
    """To be asked again and again. ``over``: whether nothing comes by any connection any more, nor is left to read."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self._threads: _Threads | None = None
        self._looked_s = time.monotonic()
        self._waited_s = self._asleep_s = self._still_s = 0.0

    def __call__(self) -> bool:
        since_s = time.monotonic() - self._looked_s
        if since_s < _LOOK_S:
            return False
        self._looked_s += since_s
        since_s = min(since_s, 2 * _LOOK_S)
        over, threads = self._over(), _asleep()  # what was read before they were looked at has woken one
        asleep = threads is not None and threads == self._threads
        self._threads = threads
        self._waited_s += since_s
        self._asleep_s = self._asleep_s + since_s if asleep else 0.0
        self._still_s = self._still_s + since_s if asleep and over else 0.0
        enough = self._waited_s >= _AWAKE_S or self._asleep_s >= _UNREAD_S
        return enough or self._still_s >= (_STILL_S if threads else _UNKNOWN_S)


def _asleep() -> _Threads | None:
    """The threads of gloo in this process, and how often each was awake that computes; None if one is awake, or has
    just ended.
    """
    found: _Threads = {}
    try:
        for task in Path("/proc/self/task").iterdir():
            name = (task / "comm").read_text().rstrip("\n")
            if name not in (_READS, _COMPUTES):
                continue
            told = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            if not told["State"].strip().startswith("S"):
                return None
            awake = (told["voluntary_ctxt_switches"], told["nonvoluntary_ctxt_switches"])
            found[task.name] = awake if name == _COMPUTES else ()
    except OSError:
        return None
    return found
