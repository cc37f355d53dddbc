"""The agent's look-out for hangs: reads all ranks' progress from shared memory, asks the kernel about their processes.

What it finds is decided in ``protocol/hang.py``. What is done: an event; the Python stacks of all ranks into the run
directory; the culprit is killed, and its death is a fault like any other.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from resilient_train._native import Board
from resilient_train.config import Settings
from resilient_train.interrupt import STACKS_SIGNAL
from resilient_train.launch.processes import Processes
from resilient_train.protocol.controller import Controller, Stage
from resilient_train.protocol.hang import Finding, HangDetector, Limits, RunState, Verdict
from resilient_train.protocol.progress import Activity, progress_of

LOOK_S = 0.05
_STOPPED_LOOKS = 20
"""Looks at a rank that stays stopped in the middle of a recovery, before it is killed."""


class Keeper(Protocol):
    """What the look-out may do: implemented by the agent."""

    def fence(self, rank: int, reason: str) -> None:
        """Kills the rank's process; its death will be told with ``reason``."""
        ...

    def give_up_collective(self, detail: str) -> None:
        """A collective does not end although all are in it: all ranks are to rebuild."""
        ...

    def tell(self, finding: Finding, detail: dict[str, object]) -> None:
        """Writes the event, and a line for people."""
        ...


class Lookout:
    """``look`` is called every ``LOOK_S``."""

    def __init__(self, board: Board, controller: Controller, processes: Processes, settings: Settings) -> None:
        limits = Limits(floor_ms=int(settings.hang_floor_s * 1000), fixed_ms=int(settings.hang_timeout_s * 1000))
        self._detector = HangDetector(board.world_size, limits)
        self._leave_limit_ms = limits.fixed_ms or limits.floor_ms
        self._since_ns = 0
        self._board = board
        self._controller = controller
        self._processes = processes
        self._seen: tuple[Stage, int] = (Stage.STARTING, 0)
        self._stopped: dict[int, int] = {}

    def look(self, keeper: Keeper) -> None:
        """One look. Cheap while the job moves: a few loads per rank."""
        controller = self._controller
        now_ns = time.monotonic_ns()
        if self._seen != (controller.stage, controller.generation):
            self._seen = (controller.stage, controller.generation)
            self._stopped.clear()
            self._since_ns = now_ns
            self._detector.restart(now_ns)
        if controller.stage is Stage.RUNNING:
            ranks = [progress_of(self._board.progress(rank)) for rank in range(self._board.world_size)]
            finding = self._detector.observe(now_ns, ranks, self._state)
            if finding is not None:
                self._act(finding, keeper)
        elif controller.stage is Stage.RECOVERING:
            self._look_at_recovery(keeper, (now_ns - self._since_ns) // 1_000_000)

    def _state(self, rank: int) -> RunState:
        process = self._processes.current.get(rank)
        return process.state() if process is not None else RunState.RUNNING

    def _look_at_recovery(self, keeper: Keeper, waited_ms: int) -> None:
        """A recovery waits for all ranks, and one that is stopped, or does not leave its step, will never come."""
        if waited_ms > self._leave_limit_ms:
            for rank in self._controller.awaited():
                if progress_of(self._board.progress(rank)).activity is not Activity.SLOW:
                    keeper.fence(rank, f"hung: it did not leave its step within {waited_ms} ms of a fault elsewhere")
        for rank in range(self._board.world_size):
            stopped = self._state(rank) is RunState.STOPPED
            self._stopped[rank] = self._stopped.get(rank, 0) + 1 if stopped else 0
            if self._stopped[rank] == _STOPPED_LOOKS:
                keeper.fence(rank, "hung: its process was stopped (SIGSTOP) in the middle of a recovery")

    def _act(self, finding: Finding, keeper: Keeper) -> None:
        detail: dict[str, object] = {
            "ranks": list(finding.ranks),
            "why": finding.why,
            "stalled_ms": finding.stalled_ms,
            "limit_ms": finding.limit_ms,
        }
        if finding.verdict is not Verdict.STRAGGLER:
            detail["stacks"] = self._ask_for_stacks()
        keeper.tell(finding, detail)
        if finding.verdict is Verdict.HUNG:
            for rank in finding.ranks:
                keeper.fence(rank, f"hung for {finding.stalled_ms} ms: {finding.why}")
        elif finding.verdict is Verdict.TOGETHER:
            keeper.give_up_collective(f"no end for {finding.stalled_ms} ms: {finding.why}")

    def _ask_for_stacks(self) -> list[int]:
        """The ranks that were asked: only one that listens, for the signal would kill another."""
        asked = []
        for process in self._processes.living():
            if _listens(process.pid):
                process.signal(STACKS_SIGNAL)
                asked.append(process.rank)
        return asked


def _listens(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (STACKS_SIGNAL - 1) & 1)
