"""What saving costs, measured on rank 0 while it trains: for ``save_every("auto")``, and for ``advise``."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from resilient_train.state.advisor import lost_time

_WINDOWS_KEPT = 101


class Learner(Protocol):
    """Who is told what was measured, in seconds: see ``state/planner.py``."""

    def step(self, duration_s: float) -> None: ...

    def kept(self, stall_s: float) -> None: ...

    def stored(self, stall_s: float, latency_s: float) -> None: ...


class _Save:
    """A save that still costs something. A window that it touched counts for it alone."""

    def __init__(self, commits: int, begun_s: float) -> None:
        self.commits = commits
        self.begun_s = begun_s
        self.waited_s = 0.0
        self.windows: list[float] = []

    def stall_s(self, usual_s: float) -> float:
        """By how much the windows were longer than usual; what the training thread waited at least."""
        return max(self.waited_s, lost_time(self.windows, usual_s))


class Meter:
    """Is told of each window's head and of each save; tells ``learner``, and writes ``save_cost`` events."""

    def __init__(self, learner: Learner | None, event: Callable[[str, dict[str, Any]], None]) -> None:
        self._learner = learner
        self._event = event
        self._head_s: float | None = None
        self._windows: deque[float] = deque(maxlen=_WINDOWS_KEPT)
        self._memory: _Save | None = None
        self._storage: _Save | None = None
        self._memory_stalls: list[float] = []

    def head(self, now_s: float, *, whole: bool) -> None:
        """A window ends and the next begins. ``whole``: no recovery was in it."""
        before_s, self._head_s = self._head_s, now_s
        if before_s is not None and whole:
            self._window(now_s - before_s)
        if self._memory is not None:
            self._end_memory(self._memory)

    def _window(self, duration_s: float) -> None:
        self._windows.append(duration_s)
        if self._learner is not None:
            self._learner.step(duration_s)
        touched = self._memory or self._storage
        if touched is not None:
            touched.windows.append(duration_s)

    def _end_memory(self, save: _Save) -> None:
        self._memory = None
        stall_s = save.stall_s(self._usual_s())
        self._memory_stalls.append(stall_s)
        if self._learner is not None:
            self._learner.kept(stall_s)

    def begun(self, commits: int, now_s: float, *, stored: bool) -> None:
        """The window that begins now begins with a save."""
        if stored:
            self._storage = _Save(commits, now_s)
        else:
            self._memory = _Save(commits, now_s)

    def waited(self, duration_s: float) -> None:
        """The training thread spent that on the newest save."""
        newest = self._memory or self._storage
        if newest is not None:
            newest.waited_s += duration_s

    def ended(self, now_s: float, *, measured: bool) -> None:
        """The save that goes to storage is there, or has failed. ``measured``: its time is that of a save."""
        save, self._storage = self._storage, None
        if save is None or not measured or not save.windows:
            return
        stall_s, latency_s = save.stall_s(self._usual_s()), now_s - save.begun_s
        if self._learner is not None:
            self._learner.stored(stall_s, latency_s)
        memory, self._memory_stalls = self._memory_stalls, []
        detail: dict[str, Any] = {
            "commits": save.commits,
            "stall_s": stall_s,
            "waited_s": save.waited_s,
            "latency_s": latency_s,
            "memory_stall_s": statistics.median(memory) if memory else None,
            "window_s": self._usual_s(),
        }
        self._event("save_cost", detail)

    def _usual_s(self) -> float:
        return statistics.median(self._windows) if self._windows else 0.0
