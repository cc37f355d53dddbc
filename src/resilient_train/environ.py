"""Who uses an environment variable: found out by a class that ``os.environ`` has for a while. Python code only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any


def _watching(plain: type[Any], look: Callable[[object], None], changed: Callable[[object], None]) -> type[Any]:
    """A class for ``os.environ`` that tells which variables are looked at, and which are written."""

    class Watching(plain):  # type: ignore[misc] # the class is known at run time only
        def __getitem__(self, key: Any) -> Any:
            look(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            look(key)
            return bool(super().__contains__(key))

        def __setitem__(self, key: Any, value: Any) -> None:
            changed(key)
            super().__setitem__(key, value)

        def __delitem__(self, key: Any) -> None:
            changed(key)
            super().__delitem__(key)

        def __iter__(self) -> Iterator[Any]:
            look(None)
            return iter(super().__iter__())

        def __repr__(self) -> str:
            look(None)
            return str(super().__repr__())

    return Watching


@contextlib.contextmanager
def reads_noted(names: frozenset[str]) -> Iterator[set[str]]:
    """Those of the variables that Python code asks for inside the block. Who takes them all asks for none."""
    found: set[str] = set()
    plain = type(os.environ)
    os.environ.__class__ = _watching(plain, lambda key: found.update(names.intersection((key,))), lambda _key: None)
    try:
        yield found
    finally:
        os.environ.__class__ = plain


class EnvironWatch:
    """From ``begin`` to ``end``, tells of each use of one of ``names``, by Python code, in whatever way.

    ``used`` is called before the use happens, with what is used: a variable's name, or "all variables" for who walks
    through them, or copies them.
    """

    def __init__(self, names: frozenset[str], used: Callable[[str], None]) -> None:
        self._names = names | {name.encode() for name in names}
        self._used = used
        self._plain: type[Any] = type(os.environ)

    def begin(self) -> None:
        """Watches; ``os.environb`` too, which is the same variables."""
        watching = _watching(self._plain, self._look, self._look)
        os.environ.__class__ = os.environb.__class__ = watching

    def end(self) -> None:
        """Watches no more."""
        os.environ.__class__ = os.environb.__class__ = self._plain

    def _look(self, key: object) -> None:
        if key is None:
            self._used("all variables")
        elif key in self._names:
            self._used(os.fsdecode(key) if isinstance(key, str | bytes) else str(key))
