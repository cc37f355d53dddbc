"""What a loader's workers draw their random numbers from, as they told it with the batches that were given."""

from __future__ import annotations

import msgspec


class _Held(msgspec.Struct, array_like=True):
    behind: dict[int, bytes]
    last: tuple[int, bytes] | None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Held)


class WorkerNumbers:
    """By worker, behind the newest batch that it has given. A worker that has drawn nothing yet is not in it."""

    def __init__(self) -> None:
        self._behind: dict[int, bytes] = {}
        self._last: tuple[int, bytes] | None = None
        """Of the newest batch: who gave it, and what it was drawn from (empty: what the worker began with)."""
        self._packed: bytes | None = b""
        self._missing = False

    def drawn(self) -> None:
        """The newest batch, and so far it has told nothing."""
        if self._last is not None:
            self._last = self._packed = None

    def told(self, worker: int, numbers: bytes) -> None:
        """With the newest batch; no ``numbers``: it could not go on from what it was given."""
        self._missing = self._missing or not numbers
        self._last = worker, self._behind.get(worker, b"")
        self._behind[worker] = numbers
        self._packed = None

    def are_missing(self) -> bool:
        """Whether a worker could not go on from what it was given, since this was asked last."""
        missing, self._missing = self._missing, False
        return missing

    def behind(self) -> dict[int, bytes]:
        return dict(self._behind)

    def undraw(self) -> None:
        """As it was in front of the newest batch."""
        if self._last is not None:
            worker, numbers = self._last
            self._behind = {each: held for each, held in {**self._behind, worker: numbers}.items() if held}
            self._last = self._packed = None

    def packed(self) -> bytes:
        """Empty if there is nothing."""
        if self._packed is None:
            self._packed = _ENCODER.encode(_Held(self._behind, self._last)) if self._behind else b""
        return self._packed

    def take_up(self, packed: bytes) -> None:
        """What ``packed`` returned."""
        held = _DECODER.decode(packed) if packed else _Held({}, None)
        self._behind, self._last, self._packed = held.behind, held.last, packed
