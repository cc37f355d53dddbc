"""MindX (taskd) decides what the controller of ``mindio_ttp`` does: a stand-in of it, and ranks without a loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.integrations.mindio import provided
from resilient_train.integrations.mindio.controller import Effect, MindioStage, MindXCall, To, TrainingEnded
from resilient_train.integrations.mindio.frames import (
    Action,
    Did,
    ExitOrder,
    ReplicaGroup,
    ReportState,
    SaveOrder,
    StopOrder,
)
from resilient_train.integrations.mindio.hub import Hub
from resilient_train.integrations.mindio.mindx import ACTIONS
from resilient_train.integrations.mindio.mindx_controller import MindXController, OrderError
from resilient_train.integrations.mindio.processor import Processor

UCE, PROCESS, NETWORK = 0, 1, 2


class Taskd:
    """What taskd does with the four callbacks: it passes them on to ClusterD, whose signals come in another thread.

    ``at_once``: as MindSpore's stand-in for MindX, which answers out of the callback, and takes no error codes.
    """

    def __init__(self, choose: Callable[[list[str]], str], *, at_once: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.silent = False
        self._choose = choose
        self._reports: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._take = self._answer if at_once else self._reports.put
        faults: Callable[..., int] = lambda ranks: self._called("report_fault_ranks", ranks)
        callbacks = {action: self._callback(action) for action in ACTIONS}
        callbacks |= {"report_fault_ranks": faults} if at_once else {}
        for action, callback in callbacks.items():
            assert provided.tft_register_mindx_callback(action, callback) == 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._reports.put(None)
        self._thread.join()

    def count(self, action: str) -> int:
        return [call[0] for call in self.calls].count(action)

    def until(self, action: str, times: int = 1) -> tuple[Any, ...]:
        """The last call, when it is this one, for so many ``times``."""
        wait_for(lambda: self.count(action) >= times and self.calls[-1][0] == action, self.calls)
        return self.calls[-1][1:]

    def _callback(self, action: str) -> Callable[..., int]:
        return lambda *given: self._called(action, *given)

    def _called(self, *call: Any) -> int:
        self.calls.append(call)
        self._take(call)
        return 0

    def _run(self) -> None:
        while (call := self._reports.get()) is not None:
            self._answer(call)

    def _answer(self, call: tuple[Any, ...]) -> None:
        match call:
            case _ if self.silent:
                pass
            case "report_fault_ranks", faults, *_:
                assert provided.tft_notify_controller_stop_train(faults, "stop") == 0
            case "report_stop_complete", 0, _, faults if faults:
                assert provided.tft_notify_controller_on_global_rank(faults) == 0
            case "report_strategies", _, strategies:
                assert provided.tft_notify_controller_change_strategy(self._choose(strategies), "") == 0


class Rank:
    """A processor whose handlers are written down."""

    def __init__(self, rank: int, port: int) -> None:
        self.done: list[str] = []
        self.ended = threading.Event()
        self.processor = Processor(rank, 2, end=lambda code: self.ended.set())
        for name in ("stop", "clean", "rollback", "save_ckpt", "rename", "exit"):
            self.processor.handlers[name] = (self._handler(name), None)
        self.processor.start("127.0.0.1", port, retries=1)
        self.processor.set_replicas((ReplicaGroup((0, 1), 2),))
        self.processor.end_updating(1)

    def _handler(self, name: str) -> Callable[..., int]:
        def handle(*_: Any) -> int:
            self.done.append(name)
            if name == "stop" and not self.processor._waits:
                self.processor.report(ReportState.RS_NORMAL)
            return 0

        return handle


class Job:
    """A controller that asks MindX, and two ranks behind their first update."""

    def __init__(self, rank: int = -1) -> None:
        provided.tft_init_controller(rank, 2, False, True, False)
        provided.tft_start_controller("127.0.0.1", 0, False, "")
        assert provided._hub is not None
        self.hub: Hub = provided._hub._hub
        self.ranks = [Rank(rank, self.hub.port) for rank in range(2)]
        self.until(MindioStage.TRAINING)
        wait_for(lambda: all(seat.step == 1 for seat in self.hub.controller.seats), self.hub.controller.seats)

    def until(self, stage: MindioStage) -> None:
        wait_for(lambda: self.hub.controller.stage is stage, self.hub.controller)


def wait_for(condition: Callable[[], bool], explain: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, explain
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def _nothing_is_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_hub", "_wanted"):
        monkeypatch.setattr(provided, name, None)
    monkeypatch.setattr(provided, "_mindx", {})
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1,UCE:1,HCCE:1,ARF:1}")
    yield
    provided.tft_destroy_controller()


@pytest.fixture
def taskd() -> Iterator[Callable[..., Taskd]]:
    made: list[Taskd] = []

    def make(*arguments: Any, **options: Any) -> Taskd:
        made.append(Taskd(*arguments, **options))
        return made[-1]

    yield make
    provided.tft_destroy_controller()
    for each in made:
        each.close()


def last(strategies: list[str]) -> str:
    return strategies[-1]


@pytest.mark.parametrize("at_once", [False, True], ids=["in a thread", "in the callback"])
def test_a_fault_is_repaired_as_mindx_says(taskd: Callable[..., Taskd], at_once: bool) -> None:
    """All four are called, in MindIO's order, with MindIO's arguments; what comes between them is answered."""
    mindx = taskd(last, at_once=at_once)
    job = Job()
    job.ranks[0].processor.report(ReportState.RS_HCCL_FAILED, "507904")
    assert all(rank.processor.wait_next_action() is Action.RETRY for rank in job.ranks)
    mindx.until("report_result")
    faults = {0: NETWORK}
    codes = [] if at_once else [{0: "507904"}]
    assert mindx.calls == [
        ("report_fault_ranks", faults, *codes),
        ("report_stop_complete", 0, "all ranks stand behind update 1", faults),
        ("report_strategies", faults, ["exit", "dump", "recover", "retry"]),
        ("report_result", 0, "all go on behind update 1", faults, "retry"),
    ]
    assert [rank.done for rank in job.ranks] == [["stop", "clean", "rollback"]] * 2
    assert job.hub.controller.stage is MindioStage.TRAINING
    job.ranks[1].processor.report(ReportState.RS_HCCL_FAILED)
    mindx.until("report_result", times=2)
    assert [call[0] for call in mindx.calls] == [*ACTIONS, *ACTIONS], "and so it is the next time"


@pytest.mark.parametrize("chosen", ["dump", "exit"])
def test_the_end_that_mindx_chooses(taskd: Callable[..., Taskd], chosen: str) -> None:
    mindx = taskd(lambda _: chosen)
    job = Job()
    job.ranks[1].processor.report(ReportState.RS_HCCL_FAILED)
    for rank in job.ranks:
        assert rank.ended.wait(30)
    saves = [name for rank in job.ranks for name in rank.done if name in ("save_ckpt", "rename")]
    assert saves == (["save_ckpt", "rename"] if chosen == "dump" else [])
    if chosen == "dump":
        assert mindx.until("report_result") == (0, "MindX has chosen dump", {1: NETWORK}, "dump")
    else:
        assert "report_result" not in [call[0] for call in mindx.calls]


def test_without_an_answer_the_state_is_saved(taskd: Callable[..., Taskd], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDIO_WAIT_MINDX_TIME", "1")
    mindx = taskd(last)
    mindx.silent = True
    job = Job()
    job.ranks[0].processor.report(ReportState.RS_HCCL_FAILED)
    why = "MindX has not answered report_fault_ranks by tft_notify_controller_stop_train in time"
    assert mindx.until("report_fault_ranks")
    assert mindx.until("report_result") == (0, why, {0: NETWORK}, "dump")


def test_a_callback_that_fails_is_no_answer(taskd: Callable[..., Taskd]) -> None:
    def choose(strategies: list[str]) -> str:
        raise LookupError("no ClusterD")

    mindx = taskd(choose, at_once=True)
    job = Job()
    job.ranks[0].processor.report(ReportState.RS_HCCL_FAILED)
    code, why, _, strategy = mindx.until("report_result")
    assert (code, strategy) == (0, "dump")
    assert why == "MindX's callback report_strategies has failed (LookupError('no ClusterD'))"


def test_mindx_has_the_state_saved(taskd: Callable[..., Taskd]) -> None:
    """There is nothing to ask then. Ranks come to the end of one more update."""
    mindx = taskd(last)
    job = Job()
    assert provided.tft_query_high_availability_switch()
    assert provided.tft_notify_controller_dump() == 0
    for rank in job.ranks:
        rank.processor.end_updating(2)
    assert mindx.until("report_result")[0] == 0
    assert [call[0] for call in mindx.calls] == ["report_result"]
    assert "save_ckpt" in job.ranks[0].done


def test_mindx_has_all_stand_and_go_on(taskd: Callable[..., Taskd]) -> None:
    mindx = taskd(last)
    job = Job()
    assert provided.tft_notify_controller_stop_train({}, "pause", 60) == 0
    assert provided.tft_notify_controller_stop_train({}, "pause", 60) == 1, "once is enough"
    for rank in job.ranks:
        rank.processor.end_updating(2)
    assert mindx.until("report_stop_complete") == (0, "all ranks stand behind update 2", {})
    assert job.hub.controller.stage is MindioStage.PAUSED
    assert provided.tft_notify_controller_change_strategy("continue") == 0
    assert mindx.until("report_result") == (0, "training goes on", {}, "continue")
    assert job.hub.controller.stage is MindioStage.TRAINING


def test_a_pause_that_mindx_forgets_is_the_end(taskd: Callable[..., Taskd]) -> None:
    mindx = taskd(last)
    job = Job()
    assert provided.tft_notify_controller_stop_train({}, "pause", 1) == 0
    for rank in job.ranks:
        rank.processor.end_updating(2)
    assert mindx.until("report_result") == (0, "MindX has not let the job go on within 1 s", {}, "dump")
    assert "save_ckpt" in job.ranks[0].done


def test_orders_that_can_not_be_carried_out_are_refused(
    taskd: Callable[..., Taskd], caplog: pytest.LogCaptureFixture
) -> None:
    """MindIO's 1, a sentence in the log, and nothing has changed."""
    order = provided.tft_notify_controller_change_strategy
    assert order("retry") == 1
    assert not provided.tft_query_high_availability_switch()
    assert "there is no controller in this process" in caplog.text
    taskd(last)
    job = Job()
    assert order("retry") == 1
    assert order("continue") == 1
    assert provided.tft_notify_controller_on_global_rank({0: PROCESS}) == 1
    assert provided.tft_notify_controller_stop_train({2: PROCESS}) == 1
    assert provided.tft_notify_controller_stop_train({0: 3}) == 1
    assert provided.tft_notify_controller_stop_train({}, "slowly") == 1
    assert provided.tft_notify_controller_prepare_action("hot switch", {0: PROCESS}) == 1
    assert "change_strategy('retry') in TRAINING, where [] can be chosen" in caplog.text
    assert "fault 1 of rank 2: there are ranks 0 to 1" in caplog.text
    assert "fault 3 of rank 0" in caplog.text
    assert job.hub.controller.stage is MindioStage.TRAINING
    assert not job.hub.controller.faulty


def test_what_can_be_registered(taskd: Callable[..., Taskd], caplog: pytest.LogCaptureFixture) -> None:
    """Three of four, and the controller decides by itself."""
    assert provided.tft_register_mindx_callback("report_weather", print) == 1
    assert provided.tft_register_mindx_callback("report_result", None) == 1  # type: ignore[arg-type]
    mindx = taskd(last)
    del provided._mindx["report_result"]
    job = Job()
    assert "MindX is not asked" in caplog.text
    assert provided.tft_notify_controller_dump() == 1
    job.ranks[0].processor.report(ReportState.RS_HCCL_FAILED)
    assert job.ranks[0].processor.wait_next_action() is Action.RETRY
    assert not mindx.calls


def test_in_a_rank_it_is_mindspores_stand_in_that_registers(
    taskd: Callable[..., Taskd], caplog: pytest.LogCaptureFixture
) -> None:
    """It would take the last strategy, and give up behind a second fault."""
    mindx = taskd(last, at_once=True)
    job = Job(rank=0)
    job.ranks[0].processor.report(ReportState.RS_HCCL_FAILED)
    assert job.ranks[0].processor.wait_next_action() is Action.RETRY
    assert not mindx.calls
    assert "the controller is in a rank; the controller decides by itself" in caplog.text


@pytest.mark.parametrize("text", ["0", "3601", "soon", "1.5"])
def test_how_long_mindx_may_take(text: str) -> None:
    assert config.mindx_wait_s({}) == 30
    assert config.mindx_wait_s({"MINDIO_WAIT_MINDX_TIME": "3600"}) == 3600
    with pytest.raises(ConfigError, match="MINDIO_WAIT_MINDX_TIME"):
        config.mindx_wait_s({"MINDIO_WAIT_MINDX_TIME": text})


# -- the controller alone


def controller(ranks: int = 3) -> MindXController:
    """All ranks hold the state behind update 3."""
    job = MindXController(ranks)
    for rank in range(ranks):
        job.hello(rank)
        job.replicas(rank, (ReplicaGroup(tuple(range(ranks)), ranks),))
        job.status(rank, 3, updating=False)
    return job


def stand(job: MindXController) -> list[MindXCall]:
    """All that are waited for have come to stand."""
    told = [each for rank in sorted(job.pending) for each in job.did(rank, Did(job.round, "lock", 0, 3))]
    return reports(told)


def reports(effects: list[Effect]) -> list[MindXCall]:
    return [each for each in effects if isinstance(each, MindXCall)]


def asked(job: MindXController, faults: dict[int, int] | None = None) -> MindXCall:
    """Until MindX is to choose."""
    job.stop_train({})
    (report,) = reports(job.on_global_rank(faults or {}))
    return report


def test_a_rank_that_only_mindx_knows_to_be_faulty_is_replaced() -> None:
    job = controller()
    assert not reports(job.stop_train({1: PROCESS}))
    assert stand(job) == [
        MindXCall("report_fault_ranks", ({1: PROCESS}, {1: ""})),
        MindXCall("report_stop_complete", (0, "all ranks stand behind update 3", {1: PROCESS})),
    ]
    (report,) = reports(job.on_global_rank({1: PROCESS}))
    assert report == MindXCall("report_strategies", ({1: PROCESS}, ["exit", "dump", "recover"]))
    effects = job.change_strategy("recover")
    assert To(1, ExitOrder(round=job.round)) in effects
    assert [each.rank for each in effects if isinstance(each, To) and isinstance(each.frame, StopOrder)] == [0, 2]
    assert job.lost == {1}
    assert job.gone(1) == [], "it is known to be lost"


def test_memory_that_only_mindx_knows_to_be_lost_is_looked_at() -> None:
    job = controller()
    job.reported(0, ReportState.RS_HCCL_FAILED)
    stand(job)
    report = asked(job, {1: UCE})
    assert report.arguments[0] == {0: NETWORK, 1: UCE}
    assert not job.seats[1].whole
    assert job.seats[1].damaged


def test_who_holds_what_nobody_else_does_is_not_replaced() -> None:
    job = controller(2)
    job.reported(1, ReportState.RS_UCE)
    for rank in range(2):
        job.did(rank, Did(job.round, "lock", rank, 3))
    assert asked(job).arguments[1] == ["exit", "dump", "recover", "retry"]
    job = controller(2)
    job.reported(1, ReportState.RS_UCE)
    job.reported(0, ReportState.RS_HCCL_FAILED)
    for rank in range(2):
        job.did(rank, Did(job.round, "lock", rank, 3))
    assert asked(job).arguments[1] == ["exit", "dump", "retry"]


def test_a_script_that_fails_can_only_be_saved() -> None:
    job = controller()
    job.reported(2, ReportState.RS_UNKNOWN)
    stand(job)
    assert asked(job) == MindXCall("report_strategies", ({2: PROCESS}, ["exit", "dump"]))
    with pytest.raises(OrderError, match="where \\['exit', 'dump'\\] can be chosen"):
        job.change_strategy("retry")
    effects = job.change_strategy("dump")
    assert any(isinstance(each, To) and isinstance(each.frame, SaveOrder) for each in effects)


def test_a_fault_before_mindx_has_chosen_is_reported_and_the_open_question_asked_anew() -> None:
    """What was answered stands: ClusterD says it once."""
    job = controller()
    job.reported(0, ReportState.RS_HCCL_FAILED)
    stand(job)
    asked(job)
    job.gone(1)
    with pytest.raises(OrderError):
        job.change_strategy("retry")  # an answer to what was asked before
    both = {0: NETWORK, 1: PROCESS}
    assert stand(job) == [
        MindXCall("report_fault_ranks", (both, {0: "", 1: ""})),
        MindXCall("report_strategies", (both, ["exit", "dump", "recover"])),
    ]
    assert job.stop_train(both) == []
    job.change_strategy("recover")
    assert job.stage is MindioStage.STOPPING


@pytest.mark.parametrize(
    ("second", "code"),
    [(lambda job: job.gone(1), 405), (lambda job: job.reported(1, ReportState.RS_UNKNOWN), 406)],
    ids=["a rank is lost", "a script fails"],
)
def test_a_fault_in_what_mindx_has_chosen_is_its_result(second: Callable[[MindXController], object], code: int) -> None:
    job = controller()
    job.reported(0, ReportState.RS_HCCL_FAILED)
    stand(job)
    asked(job)
    job.change_strategy("retry")
    second(job)
    (report,) = stand(job)
    assert report.action == "report_result"
    assert report.arguments[0] == code
    assert report.arguments[2:] == ({0: NETWORK, 1: PROCESS}, "retry")
    assert job.stage is MindioStage.CHOOSING
    job.change_strategy("recover" if code == 405 else "dump")
    assert job.stage is (MindioStage.STOPPING if code == 405 else MindioStage.SAVING)


def test_a_fault_before_ranks_have_told_of_replicas() -> None:
    """404, and nothing can be saved."""
    job = MindXController(2)
    for rank in range(2):
        job.hello(rank)
    job.gone(1)
    job.did(0, Did(job.round, "lock", 0, 0))
    effects = job.stop_train({1: PROCESS})
    stopped, result = reports(effects)
    assert stopped.arguments == (404, "a fault came before any rank had told of its replicas", {1: PROCESS})
    assert result.arguments[0] == 400
    assert any(isinstance(each, TrainingEnded) for each in effects)


def test_nobody_holds_the_state_any_more() -> None:
    """499: only the end can be chosen."""
    job = controller(2)
    job.reported(0, ReportState.RS_HCCL_FAILED)
    stand(job)
    asked(job)
    job.change_strategy("retry")
    job.reported(0, ReportState.RS_UCE)
    job.reported(1, ReportState.RS_UCE)
    told = [each for rank in range(2) for each in job.did(rank, Did(job.round, "lock", 1, 3))]
    (report,) = reports(told)
    assert report.arguments[0] == 499
    assert any(isinstance(each, TrainingEnded) for each in job.change_strategy("exit"))


def test_who_wants_the_end_is_not_asked_how() -> None:
    job = controller()
    job.reported(0, ReportState.RS_HCCL_FAILED)
    stand(job)
    assert job.stage is MindioStage.REPORTING
    job.leave("somebody wants the end")
    assert stand(job) == []
    assert job.stage is MindioStage.SAVING


def test_mindx_gives_up_those_who_do_not_come_back() -> None:
    job = controller()
    job.gone(1)
    stand(job)
    asked(job)
    job.change_strategy("recover")
    for rank in (0, 2):
        job.reported(rank, ReportState.RS_NORMAL)
        job.did(rank, Did(job.round, "stop", 0, 3))
    for rank in (0, 2):
        job.did(rank, Did(job.round, "clean", 0, 3))
    assert job.stage is MindioStage.JOINING
    job.change_strategy("dump")
    assert job.stage is MindioStage.SAVING
