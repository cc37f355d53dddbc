"""Names in the dictionaries of modules, of which a script may put something else behind each at any time.

They are looked at once a step and more, all of them, which takes the extension a tenth of the time that a loop in
Python would wait for their memory (``csrc/module_objects.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from resilient_train import _native

T = TypeVar("T")


class ModuleEntries(Generic[T]):
    """Some of them, each by its dictionary and its name there. ``missing`` is said for nothing."""

    def __init__(self, where: Iterable[tuple[dict[str, T | None], str]], missing: Any = None) -> None:
        pairs = [*where]
        self._dicts = [each for each, _ in pairs]
        self._names = [name for _, name in pairs]
        self._missing = missing

    def now(self) -> list[T | None]:
        """What stands there, in their order."""
        return _native.entries(self._dicts, self._names, self._missing)

    def are(self, known: Sequence[Any]) -> bool:
        """Whether these stand there, one for each."""
        return _native.entries_are(self._dicts, self._names, known, self._missing)

    def put(self, wanted: Sequence[T | None], *, takes_away: bool = False) -> None:
        """Puts these there, where it is not so. ``takes_away``: with the name, where there was none."""
        for owner, name, each in zip(self._dicts, self._names, wanted, strict=True):
            if owner.get(name) is each:
                continue
            if each is None and takes_away:
                del owner[name]
            else:
                owner[name] = each


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether both are of the very same objects."""
    return _native.same_objects(one, other)
