"""The variables around a body that it names: of the functions that it is written in, and of its module.

Those of the loop go on: ``for x in loader: session.call(lambda: train(x))``. Where gradients are accumulated, a body of
the window that runs again would find the newest ones. So it finds them as they were when it was called; what it writes
there itself stays written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from resilient_train.session.static_lookup import UNKNOWN, contents


class BodyVariables:
    """As they were when ``body`` was called."""

    def __init__(self, body: Callable[..., Any]) -> None:
        function = _function_of(body)
        self._cells: tuple[CellType, ...] = (function.__closure__ or ()) if function else ()
        self._globals: dict[str, Any] = function.__globals__ if function else {}
        named = function.__code__.co_names if function else ()
        self._names = [name for name in named if name in self._globals]
        self.found = self._now()
        self._at_cut: list[Any] | None = None

    def cut(self) -> None:
        """A body of the window has been left by a fault, and registered state is about to be put back. What stands for
        something else behind that has been put back: it is right.
        """
        self._at_cut = self._now()

    def _now(self) -> list[Any]:
        """UNKNOWN: it has no value (yet, or any more)."""
        return [*map(contents, self._cells), *(self._globals.get(name, UNKNOWN) for name in self._names)]

    def _write(self, place: int, value: Any) -> None:
        if place >= len(self._cells):
            name = self._names[place - len(self._cells)]
            if value is UNKNOWN:
                self._globals.pop(name, None)
            else:
                self._globals[name] = value
        elif value is not UNKNOWN:
            self._cells[place].cell_contents = value
        else:
            with contextlib.suppress(ValueError):
                del self._cells[place].cell_contents

    @contextlib.contextmanager
    def as_found(self) -> Iterator[None]:
        """Within, they are that once more."""
        now = self._now()
        before = now if self._at_cut is None else self._at_cut
        moved = [place for place, each in enumerate(self.found) if each is not now[place] is before[place]]
        for place in moved:
            self._write(place, self.found[place])
        try:
            yield
        finally:
            left = self._now() if moved else []
            for place in moved:
                if left[place] is self.found[place]:  # else it is the body's own
                    self._write(place, now[place])


def parts_of(body: Callable[..., Any]) -> list[Any]:
    """What ``functools.partial`` adds to its arguments."""
    found = []
    while type(body) is functools.partial:
        found.append((body.args, body.keywords))
        body = body.func
    return found


def _function_of(body: Callable[..., Any]) -> FunctionType | None:
    while type(body) is functools.partial:
        body = body.func
    if type(body) is MethodType:
        body = body.__func__
    return body if type(body) is FunctionType else None
