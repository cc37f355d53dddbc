"""The calls of the window that is open, kept until its update: a redo makes them again, with what they were given."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType
from typing import Any, NamedTuple

from resilient_train.errors import UsageError
from resilient_train.session.redo.body_variables import BodyVariables, parts_of


class BodyCall(NamedTuple):
    """A body and what it is called with."""

    body: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def make(self) -> Any:
        """Calls the body."""
        return self.body(*self.args, **self.kwargs)


class KeptCall:
    """One of them. Raises UsageError for arguments that can be used once only."""

    def __init__(self, call: BodyCall, look: Callable[..., bytes]) -> None:
        self.call = call
        self._given = (call.args, call.kwargs), *parts_of(call.body)
        # A generator's send is one of the generator; a class of the user's with a __next__ may well have other methods.
        bound = (call.body.__self__,) if type(call.body) is BuiltinMethodType else ()
        _refuse_iterators((*self._given, (bound, {})))
        self._variables = BodyVariables(call.body)
        self._look_at = look
        self._seen = self.look(plain=True)

    def look(self, *, plain: bool) -> bytes:
        """At what the body is given. ``plain``: at numbers and texts too, which may be others in another process (how
        often it was called) and the same data.
        """
        return self._look_at(self._given, self._variables.found, plain=plain)

    def make(self) -> Any:
        """Calls the body."""
        with self._variables.as_found():
            return self.call.make()

    def cut(self) -> None:
        """Registered state is about to be put back."""
        self._variables.cut()

    def has_changed(self) -> bool:
        """Whether the body has written into what it is given, since this was asked last."""
        before = self._seen
        if before:
            self._seen = self.look(plain=True)
        return self._seen != before


def _refuse_iterators(given: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> None:
    for value in (each for args, kwargs in given for each in (*args, *kwargs.values())):
        inner = value if type(value) in (list, tuple) else value.values() if type(value) is dict else ()
        for each in (value, *inner):
            if isinstance(each, Iterator) and not isinstance(each, io.IOBase):
                raise UsageError(
                    f"session.call hands a {type(each).__qualname__} to its body, which can be gone through once: a "
                    "step that is redone would find it used up; hand over what the body is to take from it "
                    "(docs/how-to/trainers.md)"
                )
