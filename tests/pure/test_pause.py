"""What the controller does about a pause, and what who asks is told; interleavings are explored in ``tests/sim``."""

from __future__ import annotations

import pytest

from pure.stories import at, beginning, one_kill
from resilient_train._native import Board, Page
from resilient_train.launch.agent.console_text import told
from resilient_train.launch.agent.pauses import Pauses
from resilient_train.observe.history import read_history
from resilient_train.observe.timeline import RecoveryOutcome, recoveries
from resilient_train.protocol import messages as m
from resilient_train.protocol import rank_effects as do
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.commands import Command, Note, RaiseStop, Send, SetPause
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import Stage
from resilient_train.protocol.policy import Policy
from resilient_train.protocol.rank import Halt, Meet, Rank, Target
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.strategies import tsp

STANDINGS = [Standing(7, Phase.COMPUTE)] * 2


def started(policy: Policy | None = None, *, pause_at: int | None = None) -> Controller:
    controller = Controller(2, policy)
    controller.launch()
    controller.greeted(0, 0)
    if pause_at is not None:
        controller.pause(pause_at, "operator")
    for rank in range(2):
        controller.started(rank, 0, m.Started("all", ("world",), step=3))
    return controller


def sent(commands: list[Command], kind: type) -> list[int]:
    return [each.rank for each in commands if isinstance(each, Send) and isinstance(each.message, kind)]


def notes(commands: list[Command]) -> list[str]:
    return [each.kind for each in commands if isinstance(each, Note)]


def assemble(controller: Controller, step: int, commits: int = 7) -> list[Command]:
    """Both join the recovery that has begun, and come to where its plan wants them."""
    job = controller.job
    for rank in range(2):
        holds = job.incarnations[rank] == 0
        joined = m.Joined(job.generation, commits, int(Phase.COMPUTE), holds, 0, ("world",))
        controller.joined(rank, job.incarnations[rank], joined)
    for rank in range(2):
        commands = controller.done(rank, job.incarnations[rank], job.generation, step=step)
    return commands


def test_the_first_rank_that_comes_there_has_all_brought_there() -> None:
    controller = started()
    assert controller.pause(7, "operator")[1:] == [SetPause(7)]
    begun = controller.reached(1, 0, 0)
    assert begun[0] == RaiseStop(1)
    assert notes(begun) == ["pausing"]
    assert controller.reached(0, 0, 0) == [], "of the generation before"
    assert sent(assemble(controller, 7), m.Paused) == [0, 1]
    assert controller.job.stage is Stage.PAUSED
    ended = controller.unpause()
    assert sent(ended, m.Resume) == [0, 1]
    assert ended[0] == SetPause(-1), "before anybody is let go"
    assert controller.job.stage is Stage.RUNNING


def test_a_recovery_that_ends_before_that_step_lets_all_go() -> None:
    controller = started()
    controller.pause(9, "operator")
    controller.lost(1, 0, "died", STANDINGS)
    assert sent(assemble(controller, 8), m.Resume) == [0, 1]
    controller.lost(1, 1, "died", STANDINGS)
    assert sent(assemble(controller, 9), m.Paused) == [0, 1]


def test_taken_back_when_a_rank_waits_there_already() -> None:
    controller = started()
    controller.pause(7, "operator")
    assert notes(controller.unpause()) == ["pause_withdrawn"]
    assert notes(controller.reached(1, 0, 0)) == ["pausing"], "else it would wait for ever"
    assert notes(assemble(controller, 7)) == ["resumed"]


def test_a_fault_in_a_pause_is_repaired_and_all_still_stand() -> None:
    controller = started(pause_at=0)
    assert controller.job.stage is Stage.PAUSED
    assert controller.job.step == 3
    assert notes(controller.lost(1, 0, "died", STANDINGS)) == ["fault"]
    assert notes(assemble(controller, 3)) == ["paused"]
    # Taken back while it is being repaired.
    controller.lost(1, 1, "died", STANDINGS)
    controller.unpause()
    assert notes(assemble(controller, 3)) == ["resumed"]


def test_asked_to_end_in_a_pause() -> None:
    controller = started(pause_at=0)
    assert notes(controller.leave(143, "asked")) == ["leaving"]
    assert sent(assemble(controller, 3), m.Resume) == [0, 1], "to save, and leave"
    assert tsp.refuses_to_end(controller.job)


def test_what_is_refused() -> None:
    assert "MS_ENABLE_TFT has no TSP:1" in tsp.refuses(started(Policy(pause=False)).job, 0)
    controller = started()
    assert tsp.refuses_to_end(controller.job) == "the job is not paused (RUNNING)"
    controller.pause(20, "operator")
    assert tsp.refuses(controller.job, 20) == "a pause is asked for already, before step 20"
    assert tsp.refuses(controller.job, 19) == "", "an earlier one takes its place"
    controller.stop(143, "over")
    assert tsp.refuses(controller.job, 0) == "the job is about to end (ENDED)"
    assert "paused already, before step 3" in tsp.refuses(started(pause_at=0).job, 0)
    assert "no Session" in tsp.refuses(Controller(2).job, 0)


def test_a_loop_that_is_over_is_not_held_up() -> None:
    controller = started()
    controller.pause(0, "operator")
    controller.lost(1, 0, "died", STANDINGS)
    job = controller.job
    for rank in range(2):
        joined = m.Joined(job.generation, 7, int(Phase.COMPUTE), rank == 0, 0, ("world",))
        controller.joined(rank, job.incarnations[rank], joined)
    controller.done(0, 0, 1, step=7, over=True)
    assert sent(controller.done(1, 1, 1, step=7), m.Resume) == [0, 1]
    controller.finish(0, 0, 1)
    (finished, *_) = controller.finish(1, 1, 1)
    assert finished == Note("finished", detail={"pause_at": 0})


# -- the rank


def halted() -> Rank:
    rank = Rank(0)
    for event in (on.Begin(10, 0), m.Resume(0), on.Enter(), on.UpdateBegins(), on.Ok(), on.Ok(), on.UpdateEnds()):
        rank.on(event)
    rank.on(on.Exit())
    rank.on(on.Next(10, pauses=True))
    return rank


def test_a_rank_waits_before_the_step_and_stands_where_all_do() -> None:
    rank = halted()
    assert isinstance(rank.state, Halt)
    rank.on(on.Stopped())
    rank.on(on.Quieted(1))
    rank.on(m.Plan(1, 1, {}))
    rank.on(on.Ok())
    assert isinstance(rank.state, Target)
    did = [type(effect) for effect in rank.on(m.Paused(1))]
    assert did == [do.Synchronize, do.Publish, do.SetMode, do.OnPause, do.AwaitResume]
    assert type(rank.on(m.Resume(1))[-1]) is do.ReturnStep


def test_before_the_first_step_and_in_the_middle_of_a_window() -> None:
    rank = Rank(0)
    rank.on(on.Begin(10, 0))
    did = [type(effect) for effect in rank.on(m.Paused(0))]
    assert did == [do.SetMode, do.OnPause, do.SetMode, do.AwaitResume]
    assert isinstance(rank.state, Meet)
    rank.on(m.Resume(0))
    rank.on(on.Enter())
    rank.on(on.Exit())  # a micro-step
    assert type(rank.on(on.Next(10, pauses=True))[-1]) is do.ReturnStep
    # Stopped before the first step: it has begun nothing, and what it holds is that from before it.
    early = Rank(0)
    early.on(on.Begin(10, 4, 2))
    assert [type(effect) for effect in early.on(on.Stopped())] == [do.Record, do.Quiesce]
    assert early.standing == Standing(2, Phase.COMPUTE)
    last = Rank(0)
    last.on(on.Begin(0, 0))
    assert type(last.on(m.Resume(0))[-1]) is do.AwaitFinished


# -- the agent, and what is told


class Asked:
    def __init__(self, controller: Controller) -> None:
        self.board = Board.create(2)
        self.pauses = Pauses(self.board, controller)
        self.done: list[Command] = []
        self.pauses.carry_out = self.done.extend

    def error(self, frame: m.Pause | m.Unpause) -> str:
        return self.pauses.answer(frame).error


def test_what_an_operator_is_answered() -> None:
    asked = Asked(started())
    Page(asked.board, 1).write(4, 1, 4)
    assert asked.error(m.Pause(4)) == "step 4 has begun already; the job is at step 4"
    assert asked.error(m.Pause(5)) == ""
    assert SetPause(5) in asked.done
    assert asked.pauses.status() == {"paused": None, "pause_at": 5}
    assert "asked for already" in asked.error(m.Pause(6))
    assert asked.error(m.Pause(6, rank=1)) == "", "a script asks on all ranks"
    assert asked.error(m.Unpause()) == ""
    assert "not paused" in asked.error(m.Unpause())
    assert asked.error(m.Unpause(generation=0)) == ""
    asked.board.close()


def test_a_script_does_not_end_a_later_pause() -> None:
    controller = started()
    asked = Asked(controller)
    controller.lost(1, 0, "died", STANDINGS)
    asked.pauses.answer(m.Pause())
    assert asked.error(m.Unpause(generation=0)) == ""
    assert controller.job.pause_at == 0
    asked.pauses.answer(m.Unpause(generation=1))
    assert controller.job.pause_at is None
    asked.board.close()


def test_switched_off_a_script_is_told_too() -> None:
    asked = Asked(started(Policy(pause=False)))
    assert "TSP:1" in asked.error(m.Pause(rank=0))
    asked.board.close()


@pytest.mark.parametrize(
    ("kind", "detail", "text"),
    [
        ("pause_asked", {"by": "operator", "at_step": 0}, "(operator): all ranks stop before the next step"),
        ("pause_asked", {"by": "rank 1", "at_step": 9}, "(rank 1): all ranks stop before step 9"),
        ("paused", {"step": 9}, "paused before step 9"),
        ("resumed", {"step": 9, "paused_s": 61.04}, "over after 61.0 s: training again from step 9"),
        ("pause_withdrawn", {}, "taken back"),
        ("finished", {"pause_at": 1000}, "before step 1000, was not reached"),
    ],
)
def test_the_console(kind: str, detail: dict[str, object], text: str) -> None:
    (line,) = told(kind, 1, 5.0, detail)
    assert text in line


def test_a_pause_is_neither_training_nor_recovery() -> None:
    last = at(25_500, "session_end", 0, step=110, steps=110)
    pause = [at(2000, "paused", -1, 1, step=40), at(22_000, "resumed", -1, 1, step=40)]
    assert read_history([[*beginning(), *pause, last]]).step_s == pytest.approx(5.0 / 110)
    # A fault in it, which is repaired within 351 ms.
    again = [each for each in one_kill(7000, 2) if each.kind not in ("injected", "resumed")]
    events = [*beginning(), pause[0], *again, at(7351, "paused", -1, 2, step=40), at(22_000, "resumed", -1, 2), last]
    assert read_history([events]).step_s == pytest.approx(5.0 / 110, rel=1e-3)
    (recovery,) = recoveries(events)
    assert recovery.outcome is RecoveryOutcome.RESUMED
    assert recovery.total_ms == pytest.approx(351)
