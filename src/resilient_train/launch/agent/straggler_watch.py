"""The agent's straggler watch: who has become slower than it was, from what the ranks' step records say anyway.

Each rank leaves in its page how long it computed in its last windows (``Page.begin``), and nobody is told. What is to
be made of it is decided in ``protocol/stragglers.py``. What is done: an event and a line, and with
``RESILIENT_ON_STRAGGLER=replace`` the rank is killed, once, and replaced like one that died.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Protocol

from resilient_train._native import Board
from resilient_train.config import Settings
from resilient_train.protocol.job import Job, Stage
from resilient_train.protocol.stragglers import AsBefore, Slower, Stragglers

_WARM_WINDOWS = 5
"""After a start or a recovery: in these things are built and touched for the first time."""
_WORTH_S = 2.0
"""A replacement costs the job a second or so; what has not lasted for longer may be over before."""


class StragglerKeeper(Protocol):
    """What the straggler watch may do: implemented by the agent."""

    def fence(self, ranks: Collection[int], reason: str) -> None:
        """Has the ranks' processes killed, as far as that may be; their deaths will be told with ``reason``."""
        ...

    def tell_slower(self, kind: str, rank: int, step: int, detail: dict[str, Any]) -> None:
        """Writes the event, and a line for people."""
        ...


class StragglerWatch:
    """``look`` is called twenty times a second."""

    def __init__(self, board: Board, job: Job, settings: Settings) -> None:
        self._board = board
        self._job = job
        self._replaces = settings.on_straggler == "replace"
        self._stragglers = Stragglers(board.world_size)
        self._run: tuple[int, int] = (-1, -1)
        self._read = 0
        """Updates whose windows were read, or are not to be."""
        self._told_s: dict[tuple[int, int], float] = {}
        """(rank, incarnation) -> when it was first told."""
        self._replaced: set[int] = set()

    def look(self, keeper: StragglerKeeper) -> None:
        """One look. Cheap: a few loads per rank, and some microseconds for each window."""
        job, board = self._job, self._board
        if job.stage is not Stage.RUNNING or board.world_size < 2:
            return
        done = [board.standing(rank)[0] for rank in range(board.world_size)]
        if self._run != (job.attempt, job.generation):
            self._run = job.attempt, job.generation
            if not job.verifying:  # all compute a window once more, whose time they do not write down
                self._read = max(done) + _WARM_WINDOWS
        if min(done) > self._read:
            self._observe(min(done), keeper)
        if self._replaces:
            self._replace(keeper)

    def _observe(self, until: int, keeper: StragglerKeeper) -> None:
        windows: dict[int, list[int]] = {}
        steps: dict[int, int] = {}
        for rank in range(self._board.world_size):
            for commits, step, duration_ns in self._board.computed(rank, self._read):
                if duration_ns:
                    windows.setdefault(commits, []).append(duration_ns)
                    steps[commits] = step
        self._read = until
        for commits in sorted(windows):
            if commits <= until and len(windows[commits]) == self._board.world_size:
                for found in self._stragglers.observe(steps[commits], windows[commits]):
                    self._tell(found, steps[commits], keeper)

    def _tell(self, found: Slower | AsBefore, step: int, keeper: StragglerKeeper) -> None:
        if isinstance(found, Slower):
            self._told_s.setdefault((found.rank, self._job.incarnations[found.rank]), time.monotonic())
            detail = {**described(found), "before_ms": round(found.before_ms, 3)}
            keeper.tell_slower("straggler", found.rank, step, detail)
        else:
            self._told_s = {key: told_s for key, told_s in self._told_s.items() if key[0] != found.rank}
            detail = {"since": found.since, "ratio": round(found.slower.ratio, 2), "slower_since": found.slower.since}
            keeper.tell_slower("straggler_over", found.rank, step, detail)

    def _replace(self, keeper: StragglerKeeper) -> None:
        """Once for each rank: a new process on the same device may be as slow."""
        for (rank, incarnation), told_s in self._told_s.items():
            if rank in self._replaced or time.monotonic() - told_s < _WORTH_S or self._job.finished:
                continue
            if incarnation != self._job.incarnations[rank]:
                continue  # it has died meanwhile: how fast its successor is, is not known yet
            slower = self._stragglers.slower[rank]
            # Its replacement must never cost the job: it trains, if slowly.
            if self._job.spent(rank) or self._job.holders.last([rank]):
                continue
            self._replaced.add(rank)
            keeper.fence([rank], f"computes {slower.ratio:.2f} times slower since step {slower.since}")
            return  # the recovery comes first

    def usual(self) -> dict[str, Any]:
        """For an event, by rank: how long it computes in a window, and that by its peers' time; empty if not known."""
        return {
            str(rank): {"compute_ms": round(each.compute_ms, 3), "ratio": round(each.ratio, 3)}
            for rank, each in self._stragglers.usual().items()
        }

    def status(self) -> dict[str, Any]:
        """For an operator: who is slower than it was."""
        return {"stragglers": [{"rank": each.rank, **described(each)} for each in self._stragglers.slower.values()]}


def described(slower: Slower) -> dict[str, Any]:
    """Since which step, how many times as long as before, and how long that is."""
    return {"since": slower.since, "ratio": round(slower.ratio, 2), "compute_ms": round(slower.compute_ms, 3)}
