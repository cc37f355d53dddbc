"""What the ranks' recorders have of their newest collectives: asked for when a rank stands still.

A word on the board asks all ranks at once, and each says there that its file is written
(``session/collective_report.py``). Nobody waits: the looks that the hang watch takes anyway see who has answered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from resilient_train._native import Board
from resilient_train.launch.agent.processes import RankProcess
from resilient_train.observe.collectives import file_of, heading_of

ANSWER_S = 2.0
"""How long ranks have to answer. It delays nothing."""


class Newest(NamedTuple):
    """What came of one question. ``told``: rank -> its newest collective, for people; ``silent``: no answer."""

    told: dict[int, str]
    silent: list[int]


class CollectiveReports:
    """``folder``: where the ranks write."""

    def __init__(self, board: Board, folder: Path) -> None:
        self._board = board
        self._folder = folder
        self._asked: dict[int, int] = {}
        self._from = self._until = 0.0

    def ask(self, processes: Iterable[RankProcess], *, after_s: float = 0.0) -> None:
        """Asks; of these, answers are expected. ``after_s``: not at once, but in a look behind that."""
        self._asked = {process.rank: process.incarnation for process in processes}
        self._from = time.monotonic() + after_s
        self._until = self._from + ANSWER_S
        if not after_s:
            self._ask()

    def _ask(self) -> None:
        self._from = math.inf
        self._board.ask_report()

    def look(self) -> Newest | None:
        """The answers, once: when all are there, or the time for them is over."""
        if not self._asked:
            return None
        if self._from != math.inf:
            if time.monotonic() >= self._from:
                self._ask()
            return None
        answered = [rank for rank in self._asked if self._board.reported(rank) == self._board.report_asked]
        if len(answered) < len(self._asked) and time.monotonic() < self._until:
            return None
        asked, self._asked = self._asked, {}
        told = {rank: self._told(rank, asked[rank]) for rank in answered}
        return Newest(told, [rank for rank in asked if rank not in told])

    def _told(self, rank: int, incarnation: int) -> str:
        try:
            heading = heading_of(file_of(self._folder, rank, incarnation))
        except (OSError, msgspec.DecodeError) as error:
            return f"can't be read: {error}"
        return heading.newest or heading.error or "nothing was recorded"
