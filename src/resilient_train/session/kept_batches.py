"""The batches of the window that is open, kept until its update: a step that is redone gets the same one again."""

from __future__ import annotations

from collections.abc import Callable

from resilient_train.frameworks.roles import Data
from resilient_train.protocol.progress import Activity
from resilient_train.session.loader import NO_BATCH, Batch, Cursor, Drawn
from resilient_train.session.pulse import Pulse


class KeptBatches:
    """``outlive`` is told of an error of the loader's; it may end the process."""

    def __init__(self, cursor: Cursor, data: Data, pulse: Pulse, outlive: Callable[[Exception], None]) -> None:
        self._cursor = cursor
        self._data = data
        self._pulse = pulse
        self._outlive = outlive
        self._drawn: list[Drawn] = []

    def __bool__(self) -> bool:
        return bool(self._drawn)

    def __getitem__(self, place: int) -> Drawn:
        return self._drawn[place]

    def draw(self, place: int) -> None:
        """For the step at ``place`` of the window: from the loader, or what was drawn for it before.

        Raises what the loader raises.
        """
        if place == len(self._drawn):
            batch = self._next()
            random = self._data.random_state() if place else None
            self._drawn.append(Drawn(batch, random, self._cursor.place))
        elif (random := self._drawn[place].random) is not None:
            # The batch is kept, so nothing is drawn for it; but drawing it had moved the random numbers.
            self._data.restore_random_state(random)

    def forget(self) -> None:
        """The window is closed."""
        self._drawn = []

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
