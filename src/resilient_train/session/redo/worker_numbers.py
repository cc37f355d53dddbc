"""What a loader's workers draw their random numbers from, as they told it with the batches that were given."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec


class _Given(NamedTuple):
    """A batch: a look at it, and what the worker that made it drew from in front of it. ``worker`` -1: none has told;
    no ``numbers``: what it began with.
    """

    look: bytes
    worker: int = -1
    numbers: bytes = b""


class _Held(msgspec.Struct, array_like=True):
    behind: dict[int, bytes]
    recent: list[_Given]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Held)


class WorkerNumbers:
    """By worker, behind the newest batch that it has given (one that has drawn nothing is not in it); and the newest
    batches of the pass, one for each worker: drawn once more, they tell whether all that draws has come back.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._behind: dict[int, bytes] = {}
        self._recent: deque[_Given] = deque(maxlen=max(1, workers))
        self._newest = _Given(b"")
        self._packed: bytes | None = b""
        self._missing = False

    def begin_pass(self, *, anew: bool) -> None:
        """``anew``: with new workers."""
        self._recent.clear()
        if anew:
            self._behind.clear()
        self._packed = None

    def draw(self) -> None:
        """The next batch: so far nothing has been told of it."""
        self._newest = _Given(b"")

    def told(self, worker: int, numbers: bytes) -> None:
        """With the batch that is being drawn; no ``numbers``: it could not go on from what it was given."""
        self._missing = self._missing or not numbers
        self._newest = _Given(b"", worker, self._behind.get(worker, b""))
        self._behind[worker] = numbers
        self._packed = None

    def drawn(self, look: bytes) -> None:
        """Looks at the batch that has been drawn."""
        if self._workers:
            self._recent.append(self._newest._replace(look=look))
            self._packed = None

    def are_missing(self) -> bool:
        """Whether a worker could not go on from what it was given, since this was asked last."""
        missing, self._missing = self._missing, False
        return missing

    def behind(self) -> dict[int, bytes]:
        return dict(self._behind)

    def undraw(self) -> list[bytes]:
        """As it was in front of the newest batches. Returns looks at these, in their order."""
        for each in reversed(self._recent):
            if each.worker >= 0:
                self._behind[each.worker] = each.numbers
        self._behind = {worker: held for worker, held in self._behind.items() if held}
        looks = [each.look for each in self._recent]
        self.begin_pass(anew=False)
        return looks

    def packed(self) -> bytes:
        """Empty if there is nothing."""
        if self._packed is None:
            there = self._behind or self._recent
            self._packed = _ENCODER.encode(_Held(self._behind, list(self._recent))) if there else b""
        return self._packed

    def take_up(self, packed: bytes) -> None:
        """What ``packed`` returned."""
        held = _DECODER.decode(packed) if packed else _Held({}, [])
        self._behind, self._packed, self._missing = held.behind, packed, False
        self._recent = deque(held.recent, maxlen=self._recent.maxlen)
