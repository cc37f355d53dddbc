"""What the job waits for, as the console and ``resilient-train status`` tell it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resilient_train._native import Board, Page
from resilient_train.launch.agent import waiting as module
from resilient_train.launch.agent.waiting import Waiting
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import Stage
from resilient_train.protocol.messages import Joined, Started
from resilient_train.protocol.policy import Policy
from resilient_train.protocol.standing import Standing, standing_of


class Process:
    def __init__(self, rank: int, incarnation: int = 0) -> None:
        self.rank, self.incarnation, self.pid, self.begun = rank, incarnation, 100 + rank + 10 * incarnation, 0.0
        self.code: int | None = None

    def exit_code(self) -> int | None:
        return self.code

    def is_unnoticed(self) -> bool:
        return False


class Rig:
    """An agent of two ranks without processes, whose clock is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, uses_us: bool = True) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.board = Board.create(2)
        self.controller = Controller(2, Policy())
        self.controller.job.uses_us = lambda: uses_us
        self.current: dict[int, Process] = {}
        self.said: list[str] = []
        self.waiting = Waiting(self.board, self.controller.job, self, self.said.append)  # type: ignore[arg-type]

    def living(self) -> Iterator[Process]:
        return (each for each in self.current.values() if each.code is None)

    def standings(self) -> list[Standing]:
        return [standing_of(self.board.standing(rank)) for rank in range(2)]

    def after(self, seconds: float) -> list[str]:
        """What is said in that time."""
        self.said.clear()
        for _ in range(int(seconds)):
            self.waiting.look()
            self.now += 1
        return self.said.copy()

    def train(self) -> None:
        self.current = {0: Process(0), 1: Process(1)}
        for rank in (0, 1):
            self.controller.greeted(rank, 0)
            self.controller.started(rank, 0, Started("digest", (), (), 0))
            Page(self.board, rank).write(5, 1, 7)
        assert self.controller.job.stage is Stage.RUNNING


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_long_start_is_told_every_ten_seconds(rig: Rig) -> None:
    rig.current = {0: Process(0), 1: Process(1)}
    assert rig.after(10) == []
    first, second = rig.after(20)
    whom = "rank 0 (STARTING: process 100, started 10 s ago), rank 1 (STARTING: process 101, started 10 s ago)"
    assert first == f"starting since 10 s: waits for {whom}"
    assert second == first.replace("10 s", "20 s")
    rig.train()
    assert rig.after(60) == [], "a job that trains has nothing to say"


def test_a_script_without_a_session_is_not_nagged(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, uses_us=False)
    rig.current = {0: Process(0), 1: Process(1)}
    (told,) = rig.after(100)
    assert told.startswith(
        "starting since 10 s: no rank has come to a Session; before the first step nothing is repaired"
    )


def test_a_plain_loop_waits_for_nobody(rig: Rig) -> None:
    rig.current = {0: Process(0), 1: Process(1)}
    rig.controller.is_plain(1, 0, "the watchdog is switched off")
    assert rig.after(100) == []


def test_a_recovery_says_for_whom_it_waits(rig: Rig) -> None:
    rig.train()
    rig.after(1)
    rig.controller.lost(1, 0, "died", rig.standings())
    assert rig.after(12)[0] == (
        "recovery 1: waits since 10 s for rank 0 (COMPUTE of step 7, process 100), rank 1 (no process yet) to join"
    )
    rig.current[1] = Process(1, incarnation=1)
    rig.controller.joined(0, 0, Joined(1, 5, 1, holds=True, tail_done=0, groups=()))
    (told,) = rig.after(10)
    assert told.startswith("recovery 1: waits since 20 s for rank 1 (JOINING: process 111, started 21")


def test_a_dead_process_has_no_place(rig: Rig) -> None:
    """Its step record stays, as evidence; status does not show it for its successor's."""
    rig.train()
    rig.controller.lost(1, 0, "died", rig.standings())
    row = rig.waiting.rank(1)
    assert (row["phase"], row["pid"], row["step"], row["commits"]) == ("JOINING", None, None, None)
    rig.current[1] = Process(1, incarnation=1)
    row = rig.waiting.rank(1)
    assert (row["phase"], row["pid"], row["step"], row["incarnation"]) == ("JOINING", 111, None, 1)
    assert rig.waiting.rank(0)["phase"] == "COMPUTE"
    rig.controller.joined(1, 1, Joined(1, 0, 0, holds=False, tail_done=0, groups=()))
    assert rig.waiting.rank(1)["phase"] == "COMPUTE", "what it writes from now on is its own"
    rig.current[1].code = 0
    row = rig.waiting.rank(1)
    assert (row["phase"], row["pid"]) == ("ENDED", None)


def test_the_end_of_processes_is_waited_for(rig: Rig) -> None:
    rig.train()
    rig.controller.stop(1, "over")
    rig.current[0].code = 0
    assert rig.after(12)[0] == "the training is over; waits since 10 s for the end of rank 1 (process 101)"


def test_status_says_since_when_and_for_whom(rig: Rig) -> None:
    rig.train()
    rig.controller.lost(1, 0, "died", rig.standings())
    rig.after(3)
    assert rig.waiting.status() == {"stage_s": 3.0, "waits_for": [0, 1], "unnoticed": []}
