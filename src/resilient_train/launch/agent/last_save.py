"""The agent's part when a job has to end: has the ranks' last snapshots written to storage, within the time there is.

Who saves what is the controller's decision (``strategies/ttp.py``).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

import msgspec

from resilient_train._native import Board
from resilient_train.config import Settings
from resilient_train.launch.agent.repeated_signal import RepeatedSignal
from resilient_train.launch.agent.saves import Saves
from resilient_train.launch.exit_codes import EXIT_SAVED
from resilient_train.protocol.commands import Command
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.messages import Captured, FromAgent, SaveLast
from resilient_train.protocol.replicas import disagreeing
from resilient_train.state.arena import Arena
from resilient_train.strategies import ttp


class LastSave:
    """``carry_out`` takes the controller's commands."""

    def __init__(
        self, board: Board, controller: Controller, saves: Saves, arenas: Sequence[Arena], settings: Settings
    ) -> None:
        self._board = board
        self._controller = controller
        self._saves = saves
        self._arenas = arenas
        self._settings = settings
        self._captured: dict[int, Captured] = {}
        self._generation = -1
        self._timed = False
        self._repeated = RepeatedSignal()
        self.carry_out: Callable[[list[Command]], None] = lambda _: None

    def look(self) -> None:
        """A rank may have been asked to end (SIGTERM): then so is the job. Cheap: a load per rank."""
        if self._controller.job.leaving is not None:
            return
        for rank in range(self._board.world_size):
            number = self._board.asked(rank)
            if number:
                self._board.set_asked(rank, 0)
                self.asked(f"rank {rank}", number)
                return

    def asked(self, whom: str, number: int) -> None:
        """A signal came: the job leaves, or ends at once, as the signal wants it."""
        if self._repeated.is_one(number):
            return
        told = signal.Signals(number)
        if told in EXIT_SAVED:
            self.carry_out(self._controller.leave(EXIT_SAVED[told], f"{whom} got {told.name}"))
        else:
            self.carry_out(self._controller.stop(128 + number, f"{whom} got {told.name}"))

    def begin(self) -> None:
        """The job is about to end: from now on the time runs."""
        leaving = self._controller.job.leaving
        assert leaving is not None
        if not self._timed:
            self._timed = True
            limit_s = self._settings.last_save_timeout_s if leaving.alone else self._settings.exit_grace_s
            name = "RESILIENT_LAST_SAVE_TIMEOUT_S" if leaving.alone else "RESILIENT_EXIT_GRACE_S"
            late = f"its state could not be saved within {limit_s:g} s ({name})"
            loop = asyncio.get_running_loop()
            loop.call_later(limit_s / 2, lambda: self.carry_out(self._controller.hurry()))
            loop.call_later(limit_s, lambda: self.carry_out(self._controller.saved_last(late)))

    def completed(self, message: FromAgent) -> FromAgent:
        """Puts into an order to save what the ranks that can't had published last."""
        if not isinstance(message, SaveLast) or not message.others:
            return message
        found = {rank: self._arenas[rank].published(message.commits) for rank in message.others}
        return msgspec.structs.replace(message, others={rank: own for rank, own in found.items() if own is not None})

    def captured(self, rank: int, frame: Captured) -> None:
        """A rank's last snapshot is complete. When all are, they go to storage."""
        savers = ttp.savers(self._controller.job, frame.last)
        if not savers:
            return  # of a generation that is over
        if frame.last != self._generation:
            self._generation = frame.last
            self._captured = {}
        self._captured[rank] = frame
        leaving = self._controller.job.leaving
        assert leaving is not None
        if set(self._captured) == {each for group in savers for each in group}:
            groups = self._controller.job.replicas.groups
            differing = disagreeing(groups, {each: held.fingerprint for each, held in self._captured.items()})
            if differing:
                self.carry_out(self._controller.stop(2,
                    f"{leaving.reason}; nothing is saved, because ranks {differing} are to hold the same bits after "
                    f"{frame.commits} updates, and don't"
                ))  # fmt: skip
                return
            self._saves.store_last(
                self._captured, groups, savers, leaving.reason, lambda text: self._over(frame.last, text)
            )

    def failed(self, generation: int, reason: str) -> None:
        """A rank can't do its part."""
        if ttp.savers(self._controller.job, generation):
            self._over(generation, f"its state could not be saved: {reason}")

    def _over(self, generation: int, outcome: str) -> None:
        if generation == self._controller.job.generation:
            self.carry_out(self._controller.saved_last(outcome))
