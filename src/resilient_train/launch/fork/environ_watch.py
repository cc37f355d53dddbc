"""Who uses an environment variable: found out by a class that ``os.environ`` has for a while. Python code only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

ALL = "all variables"


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
    """Those of the variables that Python code uses inside the block. Who takes them all uses none."""
    found: set[str] = set()
    watch = EnvironWatch(names, found.add)
    watch.begin()
    try:
        yield found
    finally:
        watch.end()
        found.discard(ALL)
