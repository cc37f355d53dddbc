"""What the job waits for, for whom and since when: for ``resilient-train status``, and for the console where it lasts.

A rank's step record is its own only once its process has come to its loop. Before that it tells where the predecessor
died, which is nobody's place any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from resilient_train._native import Board
from resilient_train.launch.agent.processes import Processes
from resilient_train.protocol.job import Job, Stage
from resilient_train.protocol.standing import standing_of

SAY_S = 10.0
"""A phase that takes longer is told, and again every so often."""
_NO_SESSION = "no rank has come to a Session; before the first step nothing is repaired"


class Waiting:
    """``look`` is called twenty times a second. ``say`` writes to the console."""

    def __init__(self, board: Board, job: Job, processes: Processes, say: Callable[[str], None]) -> None:
        self._board = board
        self._job = job
        self._processes = processes
        self._say = say
        self._key: object = None
        self._since = time.monotonic()
        self._told = 0

    def look(self) -> None:
        """Says what the job waits for, if it has waited for long."""
        job = self._job
        key = (job.stage, job.generation, job.attempt, job.plan is None)
        if key != self._key:
            self._key, self._since, self._told = key, time.monotonic(), 0
            return
        waited_s = time.monotonic() - self._since
        if waited_s < (self._told + 1) * SAY_S:
            return
        self._told = int(waited_s / SAY_S)
        if text := self.told(waited_s):
            self._say(text)

    def told(self, waited_s: float) -> str:
        """One line about the present stage; empty where there is nothing to be waited for."""
        job = self._job
        whom = ", ".join(self._described(rank) for rank in job.waits_for())
        since = f"since {waited_s:.0f} s"
        if job.stage is Stage.STARTING:
            if job.plain:
                return ""
            if not job.uses_a_session():  # without one this stage lasts as long as the job
                return f"starting {since}: {_NO_SESSION} ({whom})" if self._told == 1 else ""
            return f"starting {since}: waits for {whom}"
        if job.stage is Stage.RECOVERING:
            what = "to join" if job.plan is None else "to rebuild its groups and have its state"
            return f"recovery {job.generation}: waits {since} for {whom} {what}"
        if job.stage is Stage.LEAVING or job.leaving is not None:
            return f"the state is being saved {since}: waits for {whom or 'storage'}"
        living = ", ".join(f"rank {each.rank} (process {each.pid})" for each in self._processes.living())
        if job.stage in (Stage.FINISHED, Stage.ENDED) and living:
            return f"the training is over; waits {since} for the end of {living}"
        return ""

    def _described(self, rank: int) -> str:
        row = self.rank(rank)
        if row["pid"] is None:
            return f"rank {rank} ({'its process has ended' if row['phase'] == 'ENDED' else 'no process yet'})"
        age = f"process {row['pid']}, started {row['age_s']:.0f} s ago"
        if row["phase"] in ("STARTING", "JOINING"):
            return f"rank {rank} ({row['phase']}: {age})"
        return f"rank {rank} ({row['phase']} of step {row['step']}, process {row['pid']})"

    def status(self) -> dict[str, Any]:
        """For an operator: how long the stage has lasted (seconds), the ranks that it waits for, and those that are
        lost or stand still and of which the job does not know yet.
        """
        return {
            "stage_s": round(time.monotonic() - self._since, 1),
            "waits_for": self._job.waits_for(),
            "unnoticed": sorted(rank for rank, each in self._processes.current.items() if each.is_unnoticed()),
        }

    def rank(self, rank: int) -> dict[str, Any]:
        """Where a rank is. ``commits`` and ``step`` are None until its process has come to its loop."""
        job = self._job
        process = self._processes.current.get(rank)
        if process is not None and process.incarnation != job.incarnations[rank]:
            process = None  # its predecessor
        code = process.exit_code() if process is not None else None
        commits, phase = standing_of(self._board.standing(rank))
        step: int | None = self._board.step(rank)
        where = job.on_its_way(rank) or phase.name
        if code is not None:
            where = "ENDED"
        known = where not in ("STARTING", "JOINING")
        return {
            "rank": rank,
            "pid": process.pid if process is not None and code is None else None,
            "age_s": round(time.monotonic() - process.begun, 1) if process is not None else None,
            "incarnation": job.incarnations[rank],
            "commits": commits if known else None,
            "phase": where,
            "step": step if known else None,
            "beats": self._board.beats(rank),
        }
