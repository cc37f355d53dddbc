"""When the signal of a fault is not to become an exception: what random moments hit too seldom."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from resilient_train import interrupt as module
from resilient_train.errors import TrainingInterrupted
from resilient_train.faults import parse_plan
from resilient_train.interrupt import SIGNAL, Interrupt
from resilient_train.observe.sinks import JsonLines, read_events
from resilient_train.session.injection import Injector


class Watchdog:
    """Signals nobody by itself."""

    def __init__(self) -> None:
        self.armed = False

    def arm(self, _generation: int) -> None:
        self.armed = True

    def disarm(self) -> None:
        self.armed = False


@pytest.fixture
def armed() -> Iterator[Interrupt]:
    interrupt = Interrupt(Watchdog())  # type: ignore[arg-type]
    interrupt.install()
    interrupt.arm(0)
    yield interrupt
    interrupt.disarm()
    interrupt.remove()


def strike() -> None:
    signal.raise_signal(SIGNAL)


def test_it_is_raised_in_plain_code_once(armed: Interrupt) -> None:
    with pytest.raises(TrainingInterrupted):
        strike()
    assert not armed.armed
    strike()


def test_a_loop_in_another_thread_than_the_session_was_made_in_takes_no_signal() -> None:
    interrupt, failed = Interrupt(Watchdog()), list[BaseException]()  # type: ignore[arg-type]

    def loop() -> None:
        try:
            interrupt.install()
            interrupt.arm(0)
            interrupt.remove()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert not failed
    assert not interrupt.armed


def test_what_is_made_at_the_first_use_is_made_whole(armed: Interrupt) -> None:
    """FSDP's first forward pass says first that it was there: one that was cut in it was never made up for."""

    class Lazy:
        ready = False
        made = False

        def _lazy_init(self) -> None:
            if not self.ready:
                self.ready = True
                strike()
                self.made = True

    lazy = Lazy()
    lazy._lazy_init()
    assert lazy.made
    with pytest.raises(TrainingInterrupted):
        strike()


def test_a_fault_on_request_is_struck_off_and_carried_out_or_neither(armed: Interrupt, tmp_path: Path) -> None:
    """Wherever the signal of another fault comes in it."""
    sink, flipped, lines = JsonLines(tmp_path / "events.jsonl"), list[Path](), list[int]()

    class Drill:
        def flip(self, *_: object) -> dict[str, object]:
            flipped.append(tmp_path.resolve())  # the standard library's Python
            return {}

    def of_line(frame: FrameType, _event: str, _argument: object) -> Any:
        if threading.current_thread() is threading.main_thread():
            lines.append(frame.f_lineno)
            armed._on_signal(SIGNAL, frame)
        return of_line

    (clause,) = parse_plan("flip rank=0 step=3 phase=UPDATING at=start target=param mask=1")
    injector = Injector([clause], 0, 0, sink, Drill(), *[None] * 3)  # type: ignore[arg-type]
    sys.settrace(of_line)
    try:
        injector.at("UPDATING", "start", step=3)
    finally:
        sys.settrace(None)
    assert not injector.clauses
    assert flipped
    assert len(lines) > 40
    assert [event.kind for event in read_events(sink.path)] == ["injected", "flipped"]
    sink.close()
    with pytest.raises(TrainingInterrupted):
        strike()


def test_a_second_signal_does_not_leave_a_lock_that_the_first_one_spared(
    armed: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the first one looks at where it is, in code that would be no reason to wait."""
    looked = 0
    plain = module._last_attribute

    def slowly(*arguments: Any) -> str:
        nonlocal looked
        looked += 1
        strike()
        return plain(*arguments)

    monkeypatch.setattr(module, "_last_attribute", slowly)
    waits: Any = SimpleNamespace(
        f_globals={"__name__": "threading"}, f_code=threading.Condition.wait.__code__, f_lasti=0, f_back=None
    )
    armed._on_signal(SIGNAL, waits)
    assert looked == 1
    assert armed.armed, "the watchdog signals again"


def test_a_second_signal_within_a_handler_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """That handler runs to its end, each time; then the first signal is answered."""
    began, ended = 0, 0

    def handler(_number: int, _frame: Any) -> None:
        nonlocal began, ended
        began += 1
        if began == 1:
            strike()
        ended += 1

    before = signal.signal(SIGNAL, handler)
    interrupt = Interrupt(Watchdog())  # type: ignore[arg-type]
    interrupt.install()
    interrupt.arm(0)
    try:
        with pytest.raises(TrainingInterrupted):
            strike()
    finally:
        interrupt.disarm()
        interrupt.remove()
        signal.signal(SIGNAL, before)
    assert (began, ended) == (2, 2)


def test_a_swallowed_interrupt_is_raised_again_before_an_update(armed: Interrupt) -> None:
    armed.insist()
    with contextlib.suppress(BaseException):
        strike()
    with pytest.raises(TrainingInterrupted):
        armed.insist()
    armed.arm(1)
    armed.insist()
