"""What a script keeps beside the Session is told once, of what its text shows and of what its objects hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train.frameworks.roles import Objects
from resilient_train.session import kept_beside
from resilient_train.session.kept_beside import KeptBeside
from resilient_train.session.reading.loop_carried import LoopCarried


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


def beside(told: Any, loader: Any = None) -> KeptBeside:
    cursor: Any = SimpleNamespace(sources=lambda: (None, loader), loader=loader)
    window: Any = SimpleNamespace(settled=list)
    return KeptBeside(
        told, Objects(models=(), optimizers=(), schedulers=(), scaler=None, extra={}, rank_extra={}), cursor, window
    )


def trained(told: Any, *, recovered_from: int) -> list[tuple[str, ...]]:
    """What is told of a loop that keeps two things: its text shows one of them, and their objects both."""
    total, rows = 0, [[0]]
    kept = beside(told)
    for step in range(5):
        total += step
        for row in rows:
            row.append(step)
        kept.step_made(None, None, recovered=step >= recovered_from)
    return list(told.names)


def test_both_are_told_at_once_and_once() -> None:
    told = Told()
    assert trained(told, recovered_from=2) == [("total", "rows")]
    assert told.events == []


def test_a_new_process_tells_of_the_text_first() -> None:
    by_text, by_objects = trained(Told(), recovered_from=0)
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
