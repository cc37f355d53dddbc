"""The variables around a body that it names: of the functions that it is written in, and of its module.

Those of the loop go on: ``for x in loader: session.call(lambda: train(x))``. Where gradients are accumulated, a body of
the window that runs again would find the newest ones. So it finds them as they were when it was called; what it writes
there itself stays written.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from resilient_train.session.reading.static_lookup import UNKNOWN, bare, cells, contents, functions_of

_OF_MODULE = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_VARIABLES = frozenset((*dis.hasfree, *dis.haslocal))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


class _Reads(NamedTuple):
    """The variables that a function's text reads before it has written them: of its module, and of functions around. In
    an order that is the same in each process: a new one compares what they are.
    """

    of_module: tuple[str, ...]
    around: tuple[str, ...]


class BodyVariables:
    """As they were when ``body`` was called."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._cells: list[CellType] = []
        self._names: list[tuple[dict[str, Any], str]] = []
        for function in _functions_of(body):
            reads, names = _reads_of(function.__code__), function.__globals__
            self._cells += (cell for name, cell in cells(function) if name in reads.around)
            self._names += ((names, name) for name in reads.of_module if name in names)
        self.found = self._now()
        self._at_cut: list[Any] | None = None

    def cut(self) -> None:
        """Registered state is about to be put back. What stands for something else behind that has been put back: it is
        right.
        """
        self._at_cut = self._now()

    def _now(self) -> list[Any]:
        """UNKNOWN: it has no value (yet, or any more)."""
        return [*map(contents, self._cells), *(names.get(name, UNKNOWN) for names, name in self._names)]

    def _write(self, place: int, value: Any) -> None:
        if place >= len(self._cells):
            names, name = self._names[place - len(self._cells)]
            if value is UNKNOWN:
                names.pop(name, None)
            else:
                names[name] = value
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


def _functions_of(body: Callable[..., Any]) -> list[Any]:
    """Whoever's text it is: a user's trainer may be an installed package. An object's, if its class is a user's."""
    function, _ = bare(body, UNKNOWN)
    return [function] if type(function) is FunctionType else [each.function for each in functions_of(body)]


@functools.lru_cache(maxsize=256)
def _reads_of(code: CodeType) -> _Reads:
    written, of_module, around = set[str](), set[str](), set[str]()
    straight = True
    for each in dis.get_instructions(code):
        straight = straight and not each.is_jump_target and each.opcode not in _JUMPS
        name = each.argval
        if each.opname in _OF_MODULE:
            of_module |= {name} - written
        elif each.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            written |= {name} if straight else set()
        elif each.opcode in _VARIABLES:
            around |= {*(name if isinstance(name, tuple) else (name,))} & {*code.co_freevars} - written
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # what it reads of this function's own variables is no module's
            of_module |= {*_reads_of(inner).of_module} - written
    return _Reads(tuple(sorted(of_module)), tuple(sorted(around)))
