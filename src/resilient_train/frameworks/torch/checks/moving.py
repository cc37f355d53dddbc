"""Iterators and counts of the script's own, which go on in each step.

Nobody publishes where they stand. A step that is redone goes on from where its cut body has left them, and a new
process begins with them anew: other batches than those of the undisturbed run, and no error.

Looked at are the iterators of DataLoaders, where the Session was given none, and what a ``zip`` or ``enumerate`` around
the Session's steps goes through and counts, as far as it is Python's own and holds its place itself: a generator may
go by what is registered, and is only told (``session/reading``). Not seen: what a generator function of the script
around the steps counts, and iterators and random number generators in variables. (To read the variables of a function
that runs makes Python 3.11 keep their values until it returns; and a generator that each step seeds anew can't be told
from one that goes on.)
"""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Iterable, Iterator
from itertools import count, cycle, repeat
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

from torch.utils.data.dataloader import _BaseDataLoaderIter

from resilient_train.frameworks.torch.watching.reached import is_ours

_KEYS = dict[str, int]()
_KINDS = ((), [None], range(1), _KEYS, _KEYS.items(), _KEYS.values(), set[int](), "", "\x80", b"")
_ITERATORS = tuple(type(iter(each)) for each in _KINDS)
_UNTOLD = (count, cycle)
"""Nobody can ask these where they are."""
_AROUND = (zip, enumerate, map, filter, GeneratorType)
_DEEP = 4
"""So many of these lie around one another, at most."""


class _Place(NamedTuple):
    """Where an object stood when it was looked at, and how often in a row it had gone on by then."""

    thing: Any
    at: int
    times: int

    @property
    def told(self) -> str:
        kind = type(self.thing)
        if kind is enumerate:
            return "what enumerate() counts"
        if issubclass(kind, _BaseDataLoaderIter):
            return f"an iterator of a DataLoader ({type(self.thing._dataset).__qualname__})"
        return f"what zip() goes through, a {kind.__qualname__},"


class Moving:
    """Those of this process, between one look and the next."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._looks = 0

    def look(self, objects: Iterable[Any], *, loaders: bool) -> None:
        """What has gone on since the last look? ``objects``: all there are. ``loaders``: those of DataLoaders, too."""
        before, self._places = self._places, {}
        self._looks += 1
        for each, drawn in _around_the_loop(objects):
            at = _place(each) if drawn or loaders or not issubclass(type(each), _BaseDataLoaderIter) else None
            if at is None and drawn and type(each) in _UNTOLD:
                at = self._looks
            if at is not None:
                was = before.get(id(each))
                times = was.times + 1 if was is not None and was.at != at else 0
                self._places[id(each)] = _Place(each, at, times)

    def leave_out(self, published: Iterable[Any]) -> None:
        """These come back with a redo."""
        for each in published:
            self._places.pop(id(each), None)

    @property
    def found(self) -> bool:
        """Whether the last look has found something."""
        return any(each.times for each in self._places.values())

    def often(self, times: int) -> str:
        """One that has gone on so often, for people; empty if none has."""
        return next((each.told for each in self._places.values() if each.times >= times), "")

    def forget(self) -> None:
        """What was seen."""
        self._places.clear()


def _around_the_loop(objects: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """And all iterators of DataLoaders, wherever they are; with whether each step takes one of it."""
    running = set(_stack())
    drawn = dict[int, Any]()
    others = list[Any]()
    for each in objects:
        kind = type(each)
        if issubclass(kind, _BaseDataLoaderIter):
            others.append(each)
        elif (kind is zip or kind is enumerate) and _leads_to(each, running, _DEEP):
            others.append(each)
            if kind is zip:
                parts = each.__reduce__()[1]
                drawn |= {id(part): part for part in parts if not _is_steps(part, running) and type(part) is not repeat}
    yield from ((each, True) for each in drawn.values())
    yield from ((each, False) for each in others if id(each) not in drawn)


def _is_steps(part: Any, running: set[int]) -> bool:
    """Whether the steps come of it."""
    return is_ours(type(part)) or (type(part) in _AROUND and _leads_to(part, running, _DEEP))


def _stack() -> Iterator[int]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield id(frame)
        frame = frame.f_back


def _within(each: Any) -> Iterator[Any]:
    """What one of those goes through."""
    for inner in gc.get_referents(each):
        yield from inner if type(inner) is tuple else (inner,)


def _leads_to(each: Any, running: set[int], deep: int) -> bool:
    """Whether it goes through a generator that runs now, in this thread: to look is asked for by the next step."""
    if type(each) is GeneratorType and id(each.gi_frame) in running:
        return True
    inner = [part for part in _within(each) if type(part) in _AROUND or is_ours(type(part))]  # session.steps()
    return deep > 0 and any(_leads_to(part, running, deep - 1) for part in inner)


def _place(each: Any) -> int | None:
    """Where it stands; None: it is nothing that is known to go on."""
    kind = type(each)
    if kind is enumerate:
        count: int = each.__reduce__()[1][1]
        return count
    if any(kind is known for known in _ITERATORS):
        return operator.length_hint(each)
    if issubclass(kind, _BaseDataLoaderIter):
        yielded: int | None = getattr(each, "_num_yielded", None)
        return yielded
    return None
