"""The batches of the window that is open, kept until its update: a step that is redone gets the same one again.

The same is not enough where the body writes into it (``x.div_(255)``). So the first windows keep a copy, and the later
ones too once a body was seen to write; until then it costs a look at the version of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from resilient_train.frameworks.roles import Data
from resilient_train.protocol.progress import Activity
from resilient_train.session.loader import NO_BATCH, Batch, Cursor, Drawn
from resilient_train.session.pulse import Pulse

_COPIED = 2
"""So many windows keep copies of what they draw, and compare: what a body writes it writes each time, as a rule."""


class _AsDrawn(NamedTuple):
    """What a batch was when it was drawn."""

    versions: tuple[int, ...]
    seen: bytes
    """``Data.look``, which also finds what torch does not count; empty where that was not asked for."""
    copy: Any


class KeptBatches:
    """``outlive`` is told of an error of the loader's; it may end the process."""

    def __init__(self, cursor: Cursor, data: Data, pulse: Pulse, outlive: Callable[[Exception], None]) -> None:
        self._cursor = cursor
        self._data = data
        self._pulse = pulse
        self._outlive = outlive
        self._drawn: list[Drawn] = []
        self._as_drawn: list[_AsDrawn] = []
        self._windows = 0
        self.written = False
        """A body was seen to write into its batch."""

    def __bool__(self) -> bool:
        return bool(self._drawn)

    def __getitem__(self, place: int) -> Drawn:
        return self._drawn[place]

    def draw(self, place: int, *, whole: bool = False) -> bool:
        """For the step at ``place`` of the window: from the loader, or what was drawn for it before. False: a body has
        written into that, for the first time. ``whole``: it will be drawn again, so there is a copy.

        Raises what the loader raises.
        """
        if place == len(self._drawn):
            batch = self._next()
            random = self._data.random_state() if place else None
            self._drawn.append(Drawn(batch, random, self._cursor.place))
            self._as_drawn.append(self._remembered(batch.value, whole=whole))
            return True
        if (random := self._drawn[place].random) is not None:
            # The batch is kept, so nothing is drawn for it; but drawing it had moved the random numbers.
            self._data.restore_random_state(random)
        return self._as_it_was(place)

    def _remembered(self, value: Any, *, whole: bool) -> _AsDrawn:
        first = self._windows < _COPIED
        copy = self._data.copied(value) if first or whole or self.written else None
        seen = self._data.look(value) if first or whole else b""
        return _AsDrawn(self._data.versions(value), seen, copy)

    def _as_it_was(self, place: int) -> bool:
        drawn, was = self._drawn[place], self._as_drawn[place]
        if not self.written and not self._changed(place):
            return True
        if was.copy is None:
            return not self._changed(place)
        batch = drawn.batch._replace(value=self._data.copied(was.copy))
        self._drawn[place] = drawn._replace(batch=batch)
        self._as_drawn[place] = was._replace(versions=self._data.versions(batch.value))
        return True

    def _changed(self, place: int) -> bool:
        value, was = self._drawn[place].batch.value, self._as_drawn[place]
        return self._data.versions(value) != was.versions or bool(was.seen and self._data.look(value) != was.seen)

    def look(self) -> bool:
        """The bodies of the window are over. True: one was seen to write into its batch, for the first time."""
        if self.written or not any(map(self._changed, range(len(self._drawn)))):
            return False
        self.written = True
        return True

    def forget(self) -> None:
        """The window is closed."""
        self._windows += bool(self._drawn)
        self._drawn, self._as_drawn = [], []

    def _next(self) -> Batch:
        if self._cursor.loader is None:
            return NO_BATCH
        self._pulse.at(Activity.LOADING)
        try:
            batch = self._cursor.next()
        except Exception as error:
            self._outlive(error)
            raise
        self._pulse.at(Activity.TRAINING)
        return batch
