"""What ``tft_exception_handler`` makes of exceptions. Whole loops are in ``tests/process/test_mindio.py``."""

import weakref
from typing import Any

import pytest

from resilient_train.integrations.mindio import exception_handler
from resilient_train.integrations.mindio.exception_handler import handled, meaning_of, register
from resilient_train.integrations.mindio.frames import Action, ReportState


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("NPU function error: FORCE STOP, error code is 107022", "RS_NORMAL"),
        ("NPU function error: UCE ERROR, error code is 507053", "RS_UCE"),
        ("HBM MULTI BIT ECC ERROR, time us=17", "RS_UCE"),
        ("ARF FINISH , do next step repair weight.", "RS_PREREPAIR_FINISH"),
        ("STEP FINISH", "RS_STEP_FINISH"),
        ("HCCL function error: HCCL OP RETRY FAILED", "RS_HCCL_FAILED"),
        ("SUSPECT REMOTE ERROR", "RS_HCCL_FAILED"),
        ("UB LINK ERROR", "RS_HCCL_FAILED"),
        ("HCCS LINK ERROR", "RS_HCCL_FAILED"),
        ("shapes (3) and (4) do not match", "RS_UNKNOWN"),
        ("FORCE STOP behind a UCE ERROR", "RS_NORMAL"),
    ],
)
def test_words_have_a_meaning(text: str, state: str) -> None:
    assert meaning_of(text) == (ReportState[state], "")


def test_the_devices_number_is_told() -> None:
    assert meaning_of("UCE ERROR, device error type 0a1F, more") == (ReportState.RS_UCE, "0a1F")
    assert len(meaning_of(f"UCE ERROR, device error type {'f' * 40}")[1]) == 15, "MindIO takes fewer than 16"


def test_where_devices_are_not_repaired_their_errors_are_the_scripts() -> None:
    for text in ("UCE ERROR", "HBM MULTI BIT ECC", "HCCL OP RETRY FAILED"):
        assert meaning_of(text, repairs_devices=False)[0] is ReportState.RS_UNKNOWN
    assert meaning_of("FORCE STOP", repairs_devices=False)[0] is ReportState.RS_NORMAL


def test_a_script_adds_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exception_handler, "_meanings", dict(exception_handler._meanings))
    register("PRECISION ERROR", "RS_RETRY", lambda text: "noted")
    assert meaning_of("a PRECISION ERROR")[0] is ReportState.RS_RETRY, "what the handler returns is no state"
    register("HBM MULTI BIT ECC", "RS_UCE", lambda text: "RS_UCE_CORRUPTED" if "late" in text else "RS_UCE")
    assert meaning_of("HBM MULTI BIT ECC, late")[0] is ReportState.RS_UCE_CORRUPTED
    with pytest.raises(ValueError, match="'RS_X' is no ReportState; there are RS_NORMAL"):
        register("X", "RS_X", None)


class Rank:
    """Answers what it is given, and remembers what was reported."""

    def __init__(self, *actions: Action) -> None:
        self.rank, self.repairs_devices = 0, True
        self.told: list[ReportState] = []
        self.args: Any = None
        self._actions = list(actions)

    def set_args(self, args: Any) -> None:
        self.args = args

    def report(self, state: ReportState, _: str = "") -> None:
        self.told.append(state)

    def wait_next_action(self) -> Action:
        return self._actions.pop(0)


def calls(rank: Any, *outcomes: object) -> tuple[list[tuple[int, str]], Any]:
    """A function that raises, or returns, one of them at each call; what it was called with."""
    seen: list[tuple[int, str]] = []
    left = list(outcomes)

    def function(number: int, *, name: str) -> object:
        seen.append((number, name))
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return seen, handled(function, lambda: rank, lambda: seen.append((0, "over")))


def test_it_is_called_again_behind_a_repair() -> None:
    rank = Rank(Action.RETRY, Action.RETRY)
    seen, train = calls(rank, RuntimeError("UCE ERROR"), RuntimeError("FORCE STOP"), "the end")
    assert train(3, name="x") == "the end"
    assert seen == [(3, "x"), (3, "x"), (3, "x"), (0, "over")], "it is over once"
    assert rank.told == [ReportState.RS_UCE, ReportState.RS_NORMAL]
    assert train.__name__ == "function"


def test_what_is_not_repaired_is_raised() -> None:
    rank = Rank(Action.EXIT)
    _, train = calls(rank, RuntimeError("UCE ERROR"))
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        train(3, name="x")
    for error in (RuntimeError("of the script's"), ValueError("likewise")):
        rank = Rank()
        _, train = calls(rank, error)
        with pytest.raises(type(error)):
            train(3, name="x")
        assert rank.told == [ReportState.RS_UNKNOWN]


def test_a_keyboard_interrupt_is_nobodys_fault() -> None:
    rank = Rank()

    def function() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        handled(function, lambda: rank, lambda: None)()  # type: ignore[arg-type, return-value]
    assert rank.told == []


def test_what_a_handler_puts_in_the_place_of_an_argument_is_there_in_the_next_call() -> None:
    """MindSpeed-LLM's makes model and optimizer anew."""
    rank = Rank(Action.RETRY)
    seen = []

    def function(model: str, *, name: str) -> None:
        seen.append((model, name))
        if len(seen) == 1:
            rank.args[0] = "a new one"
            raise RuntimeError("UCE ERROR")

    handled(function, lambda: rank, lambda: None)("the old one", name="x")  # type: ignore[arg-type, return-value]
    assert seen == [("the old one", "x"), ("a new one", "x")]


class Tensor:
    pass


def test_what_a_failed_call_has_in_its_variables_is_let_go_before_the_repair() -> None:
    rank = Rank(Action.RETRY)
    kept: list[Any] = []

    def inner() -> None:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        raise KeyError("lost")

    def function() -> str:
        if kept:
            return "the end"
        try:
            inner()
        except KeyError as error:
            other = Tensor()
            kept.append(weakref.ref(other))
            raise RuntimeError("UCE ERROR") from error
        raise AssertionError

    def report(state: ReportState, _: str = "") -> None:
        assert [each() for each in kept] == [None, None], state

    rank.report = report  # type: ignore[method-assign]
    assert handled(function, lambda: rank, lambda: None)() == "the end"  # type: ignore[arg-type, return-value]
    assert len(kept) == 2
