"""What the names of a text stand for: in the loop's own function, and in those that it calls."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from inspect import CO_OPTIMIZED
from types import CodeType
from typing import Any

from resilient_train.session.reading.names import split_name
from resilient_train.session.reading.static_lookup import (
    UNKNOWN,
    CalledFunction,
    cells,
    contents,
    functions_of,
    held,
    held_behind,
    isinstance_past,
)

Key = tuple[int, str]
"""A variable: the object (or the namespace) that holds it, and what it is called there. Those of a function that runs:
its code.
"""


class Scope:
    """Where names are looked up: in the loop's own function, or in one that it calls."""

    def __init__(self, code: CodeType, names: dict[str, Any], values: dict[str, Any]) -> None:
        self.code, self.globals, self.values, self.where = code, names, values, ""
        self.first = code.co_varnames[0] if code.co_argcount else ""
        its_own = (*code.co_varnames, *code.co_cellvars, *code.co_freevars) if code.co_flags & CO_OPTIMIZED else ()
        self._holders = dict.fromkeys(its_own, id(self))

    @classmethod
    def of_call(cls, called: CalledFunction, given: Mapping[str, Any], around: Scope) -> Scope:
        """``given``: what parameters stand for, as far as that is known."""
        function, code = called.function, called.function.__code__
        values = {**function.__globals__, **dict.fromkeys((*code.co_varnames, *code.co_cellvars), UNKNOWN), **given}
        made = cls(code, function.__globals__, values)
        made.where = f" in {function.__qualname__.rpartition('<locals>.')[2]}"
        for name, cell in cells(function):
            values[name] = value = contents(cell)
            # A variable of the loop's own function is the same one in a function within it.
            same = name in around._holders and around.values.get(name, UNKNOWN) is value
            made._holders[name] = around._holders[name] if same else id(cell)
        return made

    def path(self, name: str) -> list[Any]:
        """What the name stands for, attribute by attribute, as far as that is known."""
        found, (first, *others) = list[Any](), split_name(name)
        value = self.values.get(first, UNKNOWN)
        while value is not UNKNOWN:
            found.append(value)
            if not others:
                break
            part = others.pop(0)
            value = _at(value, part) if part.startswith("[") else held(value, part)
        return found

    def key(self, name: str) -> Key:
        """By the object that holds it, so that two names of one variable have one."""
        first, *others = split_name(name)
        known = self.path(name)[: len(others)] if others else []
        if not known:
            return self._holders.get(first, id(self.globals)), name
        return id(known[-1]), ".".join(others[len(known) - 1 :])

    def of_bases(self, verb: str) -> list[CalledFunction]:
        """What ``super().verb`` is in this method."""
        owner, kind = self.values.get(self.first, UNKNOWN), self.values.get("__class__", UNKNOWN)
        return functions_of(held_behind(owner, kind, verb), owner)

    def is_whole(self, name: str) -> bool:
        """Whether it is known what the whole name stands for."""
        return len(self.path(name)) == len(split_name(name))


def _at(value: Any, entry: str) -> Any:
    """``entry``: ``['c']``. UNKNOWN: it has none, or which one is not written there."""
    try:
        key = ast.literal_eval(entry[1:-1])
        if isinstance_past(value, (dict,)):
            return dict.get(value, key, UNKNOWN)
        return value[key] if type(value) in (list, tuple) and type(key) is int else UNKNOWN
    except (ValueError, SyntaxError, TypeError, IndexError):
        return UNKNOWN
