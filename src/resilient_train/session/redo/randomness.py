"""The random numbers that bodies draw, apart from those of the loop around them.

What ``session.call``'s caller does between two calls (begin a pass over its data, evaluate) draws from the global
generators. A rank that is lost there had published what they were before; the process that takes its place does
something else until its first call. So the bodies' numbers must not depend on it: each body goes on where the one
before it has ended. As long as the loop draws nothing, that is where the generators stand anyway.
"""

from __future__ import annotations

from types import TracebackType

from resilient_train.frameworks.roles import Data


class BodiesRandom:
    """A context manager around each body."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._bodies: bytes | None = None
        self._loops = b""
        self._apart = False
        """The loop has drawn; from then on it has numbers of its own."""

    def __enter__(self) -> None:
        self._loops = self._data.random_state()
        if self._bodies is not None and self._bodies != self._loops:
            self._apart = True
            self._data.restore_random_state(self._bodies)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bodies = self._data.random_state()
        if self._apart:
            self._data.restore_random_state(self._loops)
