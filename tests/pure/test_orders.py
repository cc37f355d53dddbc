"""An operator's order, from the agent's word in shared memory to the fault inside the rank."""

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_train._native import Board, Page
from resilient_train.config import Settings
from resilient_train.errors import ConfigError
from resilient_train.events import Event
from resilient_train.faults import INJECTABLE, TARGETS, UCE_PLACES, check_fault, parse_plan, place_in_step
from resilient_train.launch.agent.operators import Operators
from resilient_train.launch.agent.pauses import Pauses
from resilient_train.launch.agent.straggler_watch import StragglerWatch
from resilient_train.launch.agent.waiting import Waiting
from resilient_train.protocol import messages as m
from resilient_train.protocol import orders
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.orders import LISTENING, NOBODY, FaultOrder
from resilient_train.protocol.policy import Policy
from resilient_train.session.injection import Injector
from resilient_train.session.peers import Peers
from resilient_train.state.arena import Arena


@pytest.mark.parametrize("kind", INJECTABLE)
@pytest.mark.parametrize("number", [1, 2, orders.NUMBER_MAX])
def test_round_trip(kind: str, number: int) -> None:
    for target in TARGETS if kind == "uce" else ("",):
        order = FaultOrder(number, kind, target)
        word = orders.pack(order)
        assert word.bit_length() <= 32
        assert word not in {NOBODY, LISTENING}
        assert orders.unpack(word) == order


@given(st.integers(0, 2**32 - 1))
def test_any_word(word: int) -> None:
    order = orders.unpack(word)
    assert order is None or orders.unpack(orders.pack(order)) == order


def test_a_word_that_says_that_there_is_no_order() -> None:
    assert orders.unpack(NOBODY) is orders.unpack(LISTENING) is None


def test_uce_happens_where_an_operation_can_fail() -> None:
    assert {place_in_step("uce", target) for target in TARGETS} <= set(UCE_PLACES)


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        ("kil", "", "did you mean 'kill'"),
        ("", "", "unknown kind ''"),
        ("hcce", "param", "only uce has a target, not hcce"),
        ("uce", "optimiser", "did you mean 'optimizer'"),
    ],
)
def test_there_is_no_such_fault(kind: str, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_fault(kind, target)


def alone(board: Board) -> Peers:
    def nobody(_: int) -> int:
        raise AssertionError("no arena is asked for")

    return Peers(board, 1, Arena.create(64, 0), nobody, nobody)


class Drill:
    """Remembers what was done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.hooks: dict[str, Any] = {}

    def cut(self) -> None:
        self.done.append("hcce")

    def poison(self, target: str) -> None:
        self.done.append(f"uce {target}")

    def call_in_forward(self, call: Any) -> None:
        assert "forward" not in self.hooks
        self.hooks["forward"] = call

    def call_in_backward(self, call: Any) -> None:
        assert "backward" not in self.hooks
        self.hooks["backward"] = call


class Rank:
    """Rank 1's injector, in a loop of which every step begins by ``step``."""

    def __init__(self, board: Board, plan: str = "") -> None:
        self.drill = Drill()
        self.events: list[Event] = []
        self.number = 0
        self.generation = 0
        self.seen: list[tuple[str, float]] = []
        plan_of, peers = parse_plan(plan), alone(board)
        self.injector = Injector(plan_of, 1, 0, self, self.drill, peers, self.falsify, self.falsify)  # type: ignore[arg-type]

    def falsify(self, what: str, value: float) -> None:
        self.seen.append((what, value))

    def write(self, event: Event) -> None:
        self.events.append(event)

    def listen(self) -> None:
        self.injector.open(lambda: self.number, lambda: self.generation)

    def enter(self, number: int) -> None:
        self.number = number
        self.injector.listen(number)
        self.injector.asked(on.Enter(), self)  # type: ignore[arg-type]

    def step(self, number: int) -> None:
        self.enter(number)
        for place in ("forward", "backward"):
            self.drill.hooks.get(place, lambda: None)()


@pytest.fixture
def board() -> Board:
    return Board.create(2)


def test_an_order_hits_in_the_next_step_once(board: Board) -> None:
    rank = Rank(board)
    rank.listen()
    rank.step(0)
    assert (rank.events, rank.drill.hooks) == ([], {}), "nothing is hooked before it is needed"
    assert board.exchange_order(1, LISTENING, orders.pack(FaultOrder(7, "hcce")))
    rank.step(1)
    rank.step(2)
    assert rank.drill.done == ["hcce"]
    (event,) = rank.events
    assert (event.kind, event.rank, event.step, event.phase) == ("injected", 1, 1, "COMPUTE")
    assert event.detail == {"kind": "hcce", "at": "start", "order": 7}
    assert board.order(1) == LISTENING


def test_memory_is_lost_in_the_middle_of_a_pass(board: Board) -> None:
    rank = Rank(board)
    rank.listen()
    for number, target in enumerate(TARGETS):
        board.set_order(1, orders.pack(FaultOrder(number + 1, "uce", target)))
        rank.step(number)
    assert rank.drill.done == [f"uce {target}" for target in TARGETS]
    places = ["backward" if target == "gradient" else "forward" for target in TARGETS]
    assert [event.detail["at"] for event in rank.events] == places


def test_a_step_that_was_cut_before_the_fault_leaves_it_to_the_next(board: Board) -> None:
    rank = Rank(board)
    rank.listen()
    board.set_order(1, orders.pack(FaultOrder(1, "uce", "param")))
    rank.enter(3)
    rank.number = 4  # between two steps, or in a validation pass, the model is the user's
    rank.drill.hooks["forward"]()
    assert rank.drill.done == []
    rank.step(4)
    assert rank.drill.done == ["uce param"]
    rank.step(5)
    assert len(rank.events) == 1


def test_a_plan_and_an_order(board: Board) -> None:
    rank = Rank(board, "hcce rank=1 step=1; hcce rank=1 step=2 at=forward; hcce rank=0 step=1")
    rank.listen()
    board.set_order(1, orders.pack(FaultOrder(1, "uce", "buffer")))
    rank.step(1)
    rank.step(2)
    assert rank.drill.done == ["hcce", "uce buffer", "hcce"]
    assert [event.detail.get("order") for event in rank.events] == [None, 1, None]


def test_in_a_recovery_a_clause_names_the_first_step_that_it_may_find(board: Board) -> None:
    plan = "hcce rank=1 step=7 phase=REBUILD at=end; hcce rank=1 phase=STOP; hcce rank=1 step=9 phase=STOP"
    rank = Rank(board, plan)
    hits: list[int] = []
    for step, phase, at in [(6, "REBUILD", "end"), (6, "STOP", "start"), (8, "REBUILD", "end"), (8, "STOP", "start")]:
        rank.injector.at(phase, at, step=step, generation=1)
        hits.append(len(rank.events))
    assert hits == [0, 1, 2, 2]
    rank.injector.at("STOP", "start", step=12, generation=1)
    assert [event.step for event in rank.events] == [-1, 7, 9], "as the plan has it"


@pytest.mark.parametrize("word", [NOBODY, 1 << 16, 0xFFFF_FFFF])
def test_a_foreign_word_does_nothing(board: Board, word: int) -> None:
    rank = Rank(board)
    rank.listen()
    board.set_order(1, word)
    rank.step(0)
    assert rank.events == []


def test_a_closed_session_does_not_listen(board: Board) -> None:
    rank = Rank(board)
    rank.listen()
    assert board.order(1) == LISTENING
    rank.injector.close()
    assert board.order(1) == NOBODY


class Process:
    def __init__(self, rank: int, code: int | None = None) -> None:
        self.rank, self.incarnation, self.pid = rank, 3, 4711
        self.code = code
        self.signals: list[int] = []

    def exit_code(self) -> int | None:
        return self.code

    def signal(self, number: int) -> None:
        self.signals.append(number)


class Desk:
    """The agent's side, asked over a connection that is none. Rank 0 runs, rank 1 has just ended."""

    def __init__(self, board: Board) -> None:
        self.current = {0: Process(0), 1: Process(1, -9)}
        self.notes: list[dict[str, Any]] = []
        self.sent: list[m.Reply] = []
        controller = Controller(2, Policy())
        waiting = Waiting(board, controller.job, self, self.notes.append)  # type: ignore[arg-type]
        pauses = Pauses(board, controller)
        slower = StragglerWatch(board, controller.job, Settings())
        self._operators = Operators(board, controller.job, self, waiting, pauses, slower, self._note)  # type: ignore[arg-type]

    def _note(self, kind: str, **fields: Any) -> None:
        self.notes.append({"kind": kind, **fields})

    def send(self, reply: m.Reply) -> None:
        self.sent.append(reply)

    def ask(self, frame: m.FromRank) -> m.Reply:
        self._operators.answer(self, frame)  # type: ignore[arg-type]
        return self.sent[-1]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (m.Inject("kil", 0), "did you mean 'kill'"),
        (m.Inject("device", 0), "unknown kind"),
        (m.Inject("kill", 0, "param"), "only uce has a target"),
        (m.Inject("uce", 0, "parm"), "did you mean 'param'"),
        (m.Inject("kill", 2), "there is no rank 2; the job has ranks 0 to 1"),
        (m.Inject("kill", -1), "there is no rank -1"),
        (m.Inject("hcce", 2**63), "there is no rank"),
        (m.Inject("kill", 1), "rank 1 is not running now"),
        (m.Inject("hcce", 0), "it is in no loop of a Session now"),
        (m.LoopOver(1), "an operator can't send LoopOver"),
        (m.Done(1, False, 3), "an operator can't send Done"),
    ],
)
def test_refusals(board: Board, frame: m.FromRank, words: str) -> None:
    desk = Desk(board)
    assert words in desk.ask(frame).error
    assert desk.notes == desk.current[0].signals == []
    assert board.order(0) == board.order(1) == 0


def test_a_second_order_waits_for_the_first(board: Board) -> None:
    desk = Desk(board)
    board.set_order(0, LISTENING)
    first = desk.ask(m.Inject("uce", 0, "optimizer"))
    assert (first.error, first.status["order"], first.status["incarnation"]) == ("", 1, 3)
    assert orders.unpack(board.order(0)) == FaultOrder(1, "uce", "optimizer")
    assert "ordered before" in desk.ask(m.Inject("hcce", 0)).error
    board.set_order(0, LISTENING)
    assert desk.ask(m.Inject("hcce", 0)).status["order"] == 2
    assert desk.notes == [], "the rank writes the event, when it is hit"


def test_signals_are_sent_at_once_and_written_down(board: Board) -> None:
    desk = Desk(board)
    Page(board, 0).write(5, 1, 6)
    for kind in ("stop", "kill"):
        assert desk.ask(m.Inject(kind, 0)) == m.Reply(status={"pid": 4711, "incarnation": 3, "step": 6})
    assert desk.current[0].signals == [signal.SIGSTOP, signal.SIGKILL]
    assert [note["detail"]["kind"] for note in desk.notes] == ["stop", "kill"]
    assert {note["rank"] for note in desk.notes} == {0}
