"""The steps up to one update, and where in them the loop stands."""

from __future__ import annotations

from resilient_train.session.loader import Kept


class Window:
    """``number`` is that of the step that runs or comes next, ``base`` that of the window's first."""

    def __init__(self) -> None:
        self.number = 0
        self.base = 0
        self.attempt = 0
        self.kept: list[Kept] = []
        """The batches drawn so far, for a redo."""
        self.stepped: set[int] = set()
        """The optimizers, by id, that have written."""
        self.scaled = False
        """The scaler was updated: if no optimizer ran, it had refused the update."""

    def begin_at(self, number: int) -> None:
        """The loop goes on with this step, of which nothing was done here."""
        self.number = self.base = number

    def go_back(self, *, again: bool) -> None:
        """To the head, to run again what was cut (``again``), or what a replica has not done yet."""
        self.number = self.base
        self.stepped.clear()
        self.scaled = False
        self.attempt = self.attempt + 1 if again else 0

    def close(self, number: int) -> None:
        """The update was applied in this step: the next window begins behind it."""
        self.base = number + 1
        self.kept = []
        self.attempt = 0
        self.stepped.clear()
        self.scaled = False
