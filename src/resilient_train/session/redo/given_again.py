"""What a body of ``session.call`` is given again: what an earlier call has returned, and objects that go along.

``state = session.call(train_step, state, batch)``. A process that takes a rank's place has what its loop begins with.
Nothing here keeps a tensor alive, or what holds one.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from resilient_train.session.reading.static_lookup import isinstance_past
from resilient_train.session.redo.kept_calls import BodyCall

_CALLS = 8
"""So many back: bodies may take turns."""
_LEAVES = 64
_SAME = (type(None), bool, int, str, bytes, type(...))
"""Of these two equal ones may be one object, and have nothing to do with each other."""
Reference = Callable[[], Any]


class GivenAgain:
    """Of the calls of one rank."""

    def __init__(self) -> None:
        self._returned: deque[list[Reference]] = deque(maxlen=_CALLS)
        self._before: deque[list[Reference]] = deque(maxlen=_CALLS)
        self.results = False
        """A body was given what an earlier call has returned, or a part of that."""

    def begin(self, call: BodyCall) -> None:
        """It is about to be called."""
        given = (*call.args, *call.kwargs.values())
        if not self.results and self._returned:
            returned = [each() for refs in self._returned for each in refs]
            self.results = any(leaf is each for leaf in _leaves(given) for each in returned)

    def end(self, call: BodyCall, result: Any) -> None:
        """It has returned."""
        self._returned.append([*_references(_leaves((result,)))])
        self._before.append([*_references([*call.args, *call.kwargs.values()])])

    @property
    def known(self) -> bool:
        """Whether there was a call before the last one."""
        return len(self._before) > 1

    def lasting(self, call: BodyCall) -> Mapping[str, Any]:
        """By the body's own names, what calls before the last one were given as well."""
        before = [each() for refs in [*self._before][:-1] for each in refs]
        try:
            bound = inspect.signature(call.body).bind(*call.args, **call.kwargs).arguments
        except (TypeError, ValueError):
            return {}
        return {name: value for name, value in bound.items() if any(value is each for each in before)}


def _leaves(tree: Any) -> Iterator[Any]:
    """Of nested tuples, lists and dicts what is no longer one, as far as is soon told."""
    waiting, left = [tree], _LEAVES
    while waiting and left:
        each = waiting.pop()
        left -= 1
        if isinstance_past(each, (tuple, list)):  # a class of the user's may take no slices
            items = tuple.__iter__(each) if isinstance_past(each, (tuple,)) else list.__iter__(each)
            waiting += islice(items, _LEAVES)
        elif type(each) is dict:
            waiting += [*each.values()][:_LEAVES]
        elif type(each) not in _SAME:
            yield each


def _references(values: Iterable[Any]) -> Iterator[Reference]:
    for each in values:
        try:
            yield weakref.ref(each)
        except TypeError:
            if type(each) in (float, complex) or _is_plain(each):
                yield _always(each)


def _always(value: Any) -> Reference:
    return lambda: value


def _is_plain(tree: Any) -> bool:
    """A dict or a list of some numbers and texts: not what holds a tensor."""
    if type(tree) not in (dict, list) or len(tree) > _LEAVES:
        return False
    return all(type(each) in (*_SAME, float, complex) for each in (tree.values() if type(tree) is dict else tree))
