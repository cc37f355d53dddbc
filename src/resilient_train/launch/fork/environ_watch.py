"""Who uses an environment variable: found out by a class that ``os.environ`` has for a while. Python code only."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ALL = "all variables"
_ON_THE_WAY = frozenset({__name__, "os", "collections.abc", "_collections_abc"})
_STARTERS = frozenset({"ctypes.util", "platform", "subprocess"})
"""Modules of Python's that give a copy to a program that they start, as ``find_library`` does in many an import."""


class EnvironWatch:
    """From ``begin`` to ``end``, tells of each use of one of ``names``, by Python code, in whatever way.

    ``used`` is called before the use happens, with what is used: a variable's name, or ``ALL`` for who walks through
    them, or copies them.
    """

    def __init__(self, names: frozenset[str], used: Callable[[str], None]) -> None:
        self._names = names | {name.encode() for name in names}
        self._used = used
        self._plain: type[Any] = type(os.environ)

    def begin(self) -> None:
        """Watches; ``os.environb`` too, which is the same variables."""
        look = self._look

        class Watching(self._plain):  # type: ignore[misc, name-defined] # the class is known at run time only
            def __getitem__(self, key: Any) -> Any:
                look(key)
                return super().__getitem__(key)

            def __contains__(self, key: object) -> bool:
                look(key)
                return bool(super().__contains__(key))

            def __setitem__(self, key: Any, value: Any) -> None:
                look(key)
                super().__setitem__(key, value)

            def __delitem__(self, key: Any) -> None:
                look(key)
                super().__delitem__(key)

            def __iter__(self) -> Iterator[Any]:
                look(None)
                return iter(super().__iter__())

            def __repr__(self) -> str:
                look(None)
                return str(super().__repr__())

        os.environ.__class__ = os.environb.__class__ = Watching

    def end(self) -> None:
        """Watches no more."""
        os.environ.__class__ = os.environb.__class__ = self._plain

    def _look(self, key: object) -> None:
        if key is None:
            self._used(ALL)
        elif key in self._names:
            self._used(os.fsdecode(key) if isinstance(key, str | bytes) else str(key))


@contextlib.contextmanager
def noted(names: frozenset[str]) -> Iterator[set[str]]:
    """Those of the variables that Python code uses inside the block, or ``ALL``: a copy holds each of them."""
    found: set[str] = set()

    def used(name: str) -> None:
        if name != ALL or not _passed_on():
            found.add(name)

    watch = EnvironWatch(names, used)
    watch.begin()
    try:
        yield found
    finally:
        watch.end()


def _passed_on() -> bool:
    """Whether all variables are taken for a program that is started, and nobody keeps them."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - who takes them
    while frame is not None and frame.f_globals.get("__name__") in _ON_THE_WAY:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in _STARTERS
