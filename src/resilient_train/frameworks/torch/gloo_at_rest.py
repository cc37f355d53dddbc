"""Whether gloo's threads have come to rest: then none of them writes anything any more.

A recovery leaves a collective when nothing of it can still write into gradients. Most end with an error as soon as the
connections are shut. One that gloo has forgotten (``guarded_works.py``) never ends; one that is slow (it adds up what
had come) ends later. What tells them apart is what the kernel says of the threads: the forgotten one sleeps, and nobody
is left who would wake it. So three things together are enough, and each can be seen:

* nothing comes by any connection any more, and all that had come is read;
* the threads that read sleep. They wake up each 10 ms to see whether they are to end, and find nothing then;
* the threads that compute sleep, and have not been awake for a while.

A time alone does not do: a second may be too short on a busy machine, and is long where nobody is awake.
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
_Threads = dict[str, tuple[str, ...]]


class AtRest:
    """To be asked again and again. ``over``: whether nothing comes by any connection any more, nor is left to read."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self._threads: _Threads | None = None
        self._still_s, self._looked_s = 0.0, time.monotonic()

    def __call__(self) -> bool:
        since_s = time.monotonic() - self._looked_s
        if since_s < _LOOK_S:
            return False
        self._looked_s += since_s
        threads = _asleep() if self._over() else None
        if threads is None or threads != self._threads:
            self._threads, self._still_s = threads, 0.0
            return False
        # A machine that stood still for long (a virtual one; a stopped process) has let nobody be awake meanwhile.
        self._still_s += min(since_s, 2 * _LOOK_S)
        return self._still_s >= (_STILL_S if threads else _UNKNOWN_S)


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
