"""A pause, as the agent sees it: who may ask for one and end it, what they are answered, and how long it lasts.

What it does to the job is the controller's decision (``strategies/tsp.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from resilient_train._native import Board
from resilient_train.protocol import messages as m
from resilient_train.protocol.commands import Command
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import Stage
from resilient_train.strategies import tsp


class Pauses:
    """``carry_out`` takes the controller's commands."""

    def __init__(self, board: Board, controller: Controller) -> None:
        self._board = board
        self._controller = controller
        self._job = controller.job
        self._since = 0.0
        """When all came to stand; 0: they do not. A fault that is repaired meanwhile changes nothing."""
        self.carry_out: Callable[[list[Command]], None] = lambda _: None

    def answer(self, frame: m.Pause | m.Unpause) -> m.Reply:
        """Does what is asked for, or says why not."""
        return self._pause(frame) if isinstance(frame, m.Pause) else self._unpause(frame)

    def _pause(self, frame: m.Pause) -> m.Reply:
        step = max(frame.step, 0)
        error = tsp.refuses(self._job, step)
        if frame.rank >= 0:
            if error and self._job.policy.pause:  # asked for by another rank, or too late to matter
                return m.Reply()
        else:
            error = error or self._too_late(frame.step)
        if error:
            return m.Reply(error=error)
        by = f"rank {frame.rank}" if frame.rank >= 0 else "operator"
        self.carry_out(self._controller.pause(step, by))
        return m.Reply(status={"stage": self._job.stage.value})

    def _too_late(self, step: int) -> str:
        begun = self._begun()
        return f"step {step} has begun already; the job is at step {begun}" if 0 <= step <= begun else ""

    def _begun(self) -> int:
        """The newest step that any rank has begun; -1: none has."""
        if self._job.stage is Stage.STARTING:
            return -1
        return max(self._board.step(rank) for rank in range(self._board.world_size))

    def _unpause(self, frame: m.Unpause) -> m.Reply:
        job = self._job
        if 0 <= frame.generation < job.generation:
            return m.Reply()  # a script means a pause that is over
        if error := tsp.refuses_to_end(job):
            return m.Reply(error="" if frame.generation >= 0 else error)
        status: dict[str, object] = {"was": job.stage.value, "step": job.step, "paused_s": self._paused_s()}
        self.carry_out(self._controller.unpause())
        return m.Reply(status=status)

    def _paused_s(self) -> float:
        return round(time.monotonic() - self._since, 1) if self._since else 0.0

    def noted(self, kind: str) -> dict[str, Any]:
        """The job has come to stand, or goes on, or neither: what more there is to say of it."""
        if kind == "paused":
            self._since = self._since or time.monotonic()
        elif kind in ("resumed", "leaving", "restart_all") and self._since:
            paused_s, self._since = self._paused_s(), 0.0
            return {"paused_s": paused_s}
        return {}

    def status(self) -> dict[str, Any]:
        """For an operator."""
        job = self._job
        paused = {"step": job.step, "paused_s": self._paused_s()} if job.stage is Stage.PAUSED else None
        return {"paused": paused, "pause_at": None if paused else job.pause_at}
