"""The batches of the window that is open, kept until its update: a step that is redone gets the same one again.

The same is not enough where the body writes into it (``x.div_(255)``). So the first windows keep a copy, and the later
ones too once a body was seen to write; until then it costs a look at the version of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from resilient_train.frameworks.roles import Data, PassOrder, Remembered
from resilient_train.protocol.progress import Activity
from resilient_train.session.liveness import Pulse
from resilient_train.session.redo.loader import NO_BATCH, Batch, Cursor, Drawn

_COPIED = 2
"""So many windows keep copies of what they draw, and compare: what a body writes it writes each time, as a rule."""


class _AsDrawn(NamedTuple):
    batch: Remembered
    moved: dict[str, tuple[bytes, bytes]]
    """Which objects of ``rank_state`` the loader has moved on meanwhile (a sampler, a generator), and from where to
    where; empty at a window's first step, whose beginning has it.
    """


class KeptBatches:
    """``outlive`` is told of an error of the loader's; it may end the process. ``order``: if there is something of the
    user's that a loader may move on.
    """

    def __init__(
        self,
        cursor: Cursor,
        data: Data,
        pulse: Pulse,
        outlive: Callable[[Exception], None],
        order: PassOrder | None = None,
    ) -> None:
        self._cursor = cursor
        self._data = data
        self._pulse = pulse
        self._outlive = outlive
        self._order = order
        self._drawn: list[Drawn] = []
        self._as_drawn: list[_AsDrawn] = []
        self._windows = 0
        self._written = False
        """A body was seen to write into its batch."""

    def __bool__(self) -> bool:
        return bool(self._drawn)

    def __getitem__(self, place: int) -> Drawn:
        return self._drawn[place]

    def values(self) -> list[Any]:
        """The batches of the window, as they are now."""
        return [drawn.batch.value for drawn in self._drawn]

    def given(self) -> list[Any]:
        """Those, as they were drawn too (a body may take something out), and what gives the next ones: it may have them
        already. Nothing where there is no loader.
        """
        if self._cursor.loader is None:
            return []
        return [*self.values(), *(each.batch for each in self._as_drawn), *self._cursor.sources()]

    @property
    def first(self) -> bool:
        """Whether this is one of the first windows of the process."""
        return self._windows < _COPIED

    def has(self, place: int) -> bool:
        """Whether it was drawn for before."""
        return place < len(self._drawn)

    def draw(self, place: int, *, whole: bool = False) -> bool:
        """For the step at ``place`` of the window: from the loader, or what was drawn for it before. False: a body has
        written into that, for the first time. ``whole``: it will be drawn again, so there is a copy.

        Raises what the loader raises.
        """
        if not self.has(place):
            before = self._entries() if place else {}
            batch = self._next()
            moved = self._moved_since(before)
            random = self._data.random_state() if place else None
            copies, looks = self.first or whole or self._written, self.first or whole
            remembered = self._data.remember(batch.value, copies=copies, looks=looks)
            self._drawn.append(Drawn(batch, random, self._cursor.place))
            self._as_drawn.append(_AsDrawn(remembered, moved))
            return True
        drawn, was = self._drawn[place], self._as_drawn[place]
        # Nothing is drawn again; but drawing had moved random numbers, and perhaps state of the rank's own.
        if drawn.random is not None:
            self._data.restore_random_state(drawn.random)
        return self._move_on(was.moved) and was.batch.put_back()

    def _moved_since(self, before: dict[str, bytes]) -> dict[str, tuple[bytes, bytes]]:
        now = self._entries() if before else {}
        return {name: (was, now[name]) for name, was in before.items() if now[name] != was}

    def _move_on(self, moved: dict[str, tuple[bytes, bytes]]) -> bool:
        """As drawing did. An object that bodies change as well is where it was then only if they have done the same."""
        if not moved or self._order is None:
            return True
        now = self._entries()
        for name, (before, after) in moved.items():
            if now[name] != before:
                return False
            self._order.restore({name: after})
        return True

    def _entries(self) -> dict[str, bytes]:
        return self._order.own() if self._order is not None else {}

    def look(self) -> bool:
        """The bodies of the window are over. True: one was seen to write into its batch, for the first time."""
        if self._written or not any(each.batch.written() for each in self._as_drawn):
            return False
        self._written = True
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
