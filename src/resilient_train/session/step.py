"""One pass through the loop's body, as a context manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Protocol, Self


class StepListener(Protocol):
    """Who is told that a body begins and ends."""

    def enter(self, step: Step) -> None:
        """The body begins."""
        ...

    def leave(self, step: Step, error: BaseException | None) -> bool:
        """The body ended, with ``error`` if one is on its way out. True keeps it in: the step will run again."""
        ...


class Step:
    """``number`` counts from 0 over the whole training; ``attempt`` is above 0 when the step runs again after a fault.

    ``done`` becomes True when the body has run to its end. Python cannot skip what stands behind the ``with`` block in
    the loop, so after an interrupted attempt it runs as well: put ``if step.done:`` before it. The body will not run
    again if it has updated; where an update takes several steps, a fault before it has them all run once more.
    ``batch`` is what the Session's loader gave for this step (None without a loader), ``epoch`` the loader's pass.
    """

    __slots__ = ("_body", "attempt", "batch", "done", "entered", "epoch", "number")

    def __init__(self, body: StepListener, number: int, batch: Any = None, epoch: int = 0, attempt: int = 0) -> None:
        self._body = body
        self.number = number
        self.batch = batch
        self.epoch = epoch
        self.attempt = attempt
        self.entered = False
        self.done = False

    def __enter__(self) -> Self:
        self.entered = True
        self._body.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[True] | None:
        if self._body.leave(self, error):
            return True
        self.done = error is None
        return None

    def __index__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"Step({self.number}, attempt={self.attempt})"


class Steps(Iterator[Step]):
    """What ``session.steps()`` gives. A second ``for`` over it is another loop of the script's: ``next_loop``."""

    __slots__ = ("_drawn", "_next_loop", "_steps")  # so that `gc` finds the generator in it, as moving.py needs

    def __init__(self, steps: Iterator[Step], next_loop: Callable[[], None]) -> None:
        self._steps, self._next_loop = steps, next_loop
        self._drawn = False

    def __iter__(self) -> Self:
        if self._drawn:
            self._next_loop()
        self._drawn = False
        return self

    def __next__(self) -> Step:
        self._drawn = True
        return next(self._steps)
