"""What a script keeps beside the Session is told once, of what its text shows and of what its objects hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train.frameworks.roles import Objects
from resilient_train.session import kept_beside
from resilient_train.session.kept_beside import KeptBeside
from resilient_train.session.reading.loop_carried import LoopCarried
from resilient_train.session.redo.given_again import GivenAgain
from resilient_train.session.redo.kept_calls import BodyCall


class Told:
    """As ``Notices``."""

    def __init__(self, *, is_speaker: bool = True) -> None:
        self.is_speaker = is_speaker
        self.names, self.events = list[tuple[str, ...]](), list[tuple[str, Any]]()
        self.said = ""

    def carried(self, found: LoopCarried) -> None:
        self.names.append(found.names)

    def event(self, kind: str, detail: Any) -> None:
        self.events.append((kind, detail))

    def say(self, text: str) -> None:
        self.said = text


OF_THE_TEST = ("told.names", "@py_assert2.names")
"""What is told is kept as well."""


def beside(told: Any, loader: Any = None) -> KeptBeside:
    cursor: Any = SimpleNamespace(sources=lambda: (None, loader), loader=loader)
    window: Any = SimpleNamespace(settled=list)
    return KeptBeside(
        told, Objects(models=(), optimizers=(), schedulers=(), scaler=None, extra={}, rank_extra={}), cursor, window
    )


def trained(told: Any, *, recovered_at: tuple[int, ...], late: int = 0) -> list[tuple[str, ...]]:
    """What is told of a loop that keeps two things: its text shows one of them, and their objects both; one more begins
    to change so ``late``.
    """
    total, rows, counts = 0, [[0]], [[0]]
    kept = beside(told)
    for step in range(5):
        total += step
        for row in rows:
            row.append(step)
        for count in counts if late and step >= late else ():
            count[0] += 1
        kept.step_made(None, None, recovered=step in recovered_at)
    assert {*chain(*told.names)} <= {"total", "rows", "counts", *OF_THE_TEST}
    return [left for names in told.names if (left := tuple(each for each in names if each not in OF_THE_TEST))]


def test_both_are_told_at_once_and_once() -> None:
    told = Told()
    assert trained(told, recovered_at=(2, 4)) == [("total", "rows")]
    assert told.events == []


def test_what_begins_to_change_behind_the_first_recovery_is_told_behind_the_next() -> None:
    assert trained(Told(), recovered_at=(1, 4), late=3) == [("total", "rows"), ("counts",)]


def test_a_function_that_hands_the_steps_on_is_no_loop_of_the_scripts() -> None:
    told = Told()
    kept = beside(told)

    def handed_on(steps: Iterable[int]) -> Iterator[int]:
        for each in steps:
            yield each
            assert each < 5

    class Counted:
        def __init__(self, steps: Iterable[int]) -> None:
            self.steps = iter(steps)

        def __iter__(self) -> Counted:
            return self

        def __next__(self) -> int:
            return next(self.steps)

    def steps() -> Iterator[int]:
        for step in range(3):
            yield step
            kept.step_made(None, None, recovered=step > 1)

    best, total = 9, 0
    for step in Counted(handed_on(steps())):
        best = min(best, step)
        total += step
        step_of_this = step + total
    assert (best, step_of_this) == (0, 5)
    assert told.names == [("best", "total")]


def test_calls_are_made_in_loops_of_functions_around_them() -> None:
    told, best, seen = Told(), 9, list[int]()
    kept, again = beside(told), GivenAgain()

    def epoch(number: int) -> int:
        total = 0
        for batch in range(2):
            total += batch
            kept.step_made(BodyCall(abs, (batch,), {}), again, recovered=number == 1 and batch == 0)
        return total

    for number in range(2):
        best = min(best, epoch(number))
        seen.append(best)
    assert best == seen[-1] == 1
    assert told.names == [("total", "best", "seen")]


def test_a_new_process_tells_of_the_text_first() -> None:
    by_text, by_objects = trained(Told(), recovered_at=(0,))
    assert by_text == ("total",)
    assert "rows" in by_objects


def test_others_say_nothing() -> None:
    told, total = Told(is_speaker=False), 0
    kept = beside(told)
    for step in range(3):
        total += step
        kept.step_made(None, None, recovered=True)
    assert told.names == []


def test_small_numbers_are_no_objects_of_a_loaders() -> None:
    """Python has one 3 for all: it was left out of the first look, and was new in the second."""
    told, asked, loader = Told(), SimpleNamespace(save=3), SimpleNamespace(dataset=[0], batch_size=3)
    kept = beside(told, loader)
    for step in range(3):
        kept.step_made(None, None, recovered=step > 1)
        loader = SimpleNamespace(dataset=[0], batch_size=5)
        kept._cursor.loader = loader
        kept._cursor.sources = lambda loader=loader: (None, loader)  # type: ignore[method-assign,misc]
    assert asked.save == 3
    assert [each for names in told.names for each in names if each.startswith("asked")] == []


def test_what_can_not_be_looked_at_takes_nothing_from_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise TypeError("an object")

    monkeypatch.setattr(kept_beside, "contents_of", fails)
    told, total = Told(), 0
    kept = beside(told)
    for step in range(3):
        total += step
        kept.step_made(None, None, recovered=step > 1)
    assert told.names == [("total",)]
    assert told.events == [("loop_unread", {"error": "TypeError: an object"})]
    assert "could not be found out (TypeError: an object)" in told.said


def test_a_loop_may_have_no_statement_of_its_own() -> None:
    told = Told()
    kept = beside(told)

    def steps() -> Iterator[int]:
        for step in range(3):
            yield step
            kept.step_made(None, None, recovered=step > 1)

    def train(step: int) -> float:
        global AVERAGE_OF_STEPS
        AVERAGE_OF_STEPS = 0.9 * AVERAGE_OF_STEPS + step
        return AVERAGE_OF_STEPS

    for run in (
        lambda: sum(train(step) for step in steps()),
        lambda: sum(map(train, steps())),
    ):
        told.names.clear()
        kept = beside(told)
        run()
        assert told.names == [("AVERAGE_OF_STEPS in train",)]
    told.names.clear()
    kept = beside(told)
    for _ in map(train, steps()):
        pass
    assert told.names == [("AVERAGE_OF_STEPS in train",)]


AVERAGE_OF_STEPS = 0.0


def test_the_function_that_draws_a_step_may_have_a_loop() -> None:
    told, total = Told(), 0
    kept = beside(told)

    def steps() -> Iterator[int]:
        for step in range(3):
            yield step
            kept.step_made(None, None, recovered=step > 1)

    def drawn(source: Iterator[int]) -> int | None:
        for _ in range(3):
            try:
                return next(source, None)
            except OSError:
                continue
        return None

    source = steps()
    while (step := drawn(source)) is not None:
        total += step
    assert total == 3
    assert told.names == [("source", "total")]  # this one is no Session's
