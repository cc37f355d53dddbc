"""What the collectives before a rank's loop gave it, in order: for a process that takes its place.

Such a process runs the script from the top while the others train, so nobody answers its collectives. Each is answered
with what the first process of the rank was given, and must be the same call: of the same group, at the same place in
that group's order, with the same header (verb, arguments, dtypes and shapes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from resilient_train.errors import ProtocolError

RESULT_BYTES = 64 << 10
"""A result larger than this is not kept, unless a new process can't do without it: objects."""
TOTAL_BYTES = 4 << 20
"""Of one rank: results, headers and places. Of what it could do without half of it."""

LARGE_RESULTS = "large results"
"""Stands for a group: calls that read a value of what came of results that are not kept."""
_OF_WEIGHTS = "weights of "
"""Before a group's name: of weights that were handed out in it, which need not be the same each time."""
_LEFT = "left by "
"""Before a line of the script, as a group: what that has made of what is not kept, and is left when the loop begins."""


class SetUpEntry(msgspec.Struct, array_like=True):
    """One call. ``place`` is where the script made it; ``source`` the rank that a receive from anybody heard from."""

    group: str
    header: bytes
    place: str
    result: bytes | None = None
    """None: there is none, or it need not be known."""
    source: int = -1


class _Packed(msgspec.Struct, array_like=True):
    entries: list[SetUpEntry] = []
    others: bytes = b""


_decoder = msgspec.msgpack.Decoder(_Packed)


class SetUpRecord:
    """The calls of one process, while it makes them."""

    def __init__(self) -> None:
        self.entries: list[SetUpEntry] = []
        self.full_at = ""
        """The place of the first call that is not recorded: there was no room for it. Nothing is recorded behind it."""
        self._bytes = 0

    def enter(
        self, group: str, header: bytes, place: str, result_bytes: int, *, whole: bool = False
    ) -> tuple[SetUpEntry | None, bool]:
        """The entry of a call, whose result is to be put in when it is there, and whether there is room for that.
        ``whole``: a new process can't do without it, so it may take all of the room that is left.

        No entry: the record is full.
        """
        bare_bytes = len(group) + len(header) + len(place)
        if self.full_at or self._bytes + bare_bytes > TOTAL_BYTES:
            self.end(place)
            return None, False
        self._bytes += bare_bytes
        limit_bytes = TOTAL_BYTES if whole else min(self._bytes + RESULT_BYTES, TOTAL_BYTES // 2)
        room = self._bytes + result_bytes <= limit_bytes
        if room:
            self._bytes += result_bytes
        entry = SetUpEntry(group, header, place)
        self.entries.append(entry)
        return entry, room

    def end(self, place: str) -> None:
        """Nothing is recorded any more, from the call at ``place`` on."""
        self.full_at = self.full_at or place
        self.entries.clear()

    def enter_weights(self, group: str, place: str, digest: bytes, *, changed: bool) -> bool:
        """Weights that a rank has been handed in this group, as ``digest`` has them: in a new process they are its own
        until the loop begins. ``changed``: they had been others in this one. False: the record is full.
        """
        entry, _ = self.enter(_OF_WEIGHTS + group, b"changed" if changed else b"", place, len(digest), whole=True)
        if entry is not None:
            entry.result = digest
        return entry is not None

    def enter_left(self, place: str, data: bytes) -> bool:
        """Something small that the script has made at ``place`` and still has when the loop begins, of what a new
        process is not given. False: there is no room.
        """
        entry, room = self.enter(_LEFT + place, b"", place, len(data), whole=True)
        if entry is not None and room:
            entry.result = data
        return entry is not None and room

    def packed(self, others: bytes = b"") -> bytes:
        """For ``Recorded``, in another process. ``others``: of what the script has made by then."""
        return msgspec.msgpack.encode(_Packed(self.entries, others))


class DifferenceError(Exception):
    """A process does not make the calls that its predecessor has made; the text says which, and where."""


class Recorded:
    """The calls of the predecessor, while they are made again. ``told`` puts a header into words."""

    def __init__(self, packed: bytes, told: Callable[[bytes], str]) -> None:
        """Raises ProtocolError unless ``packed`` is a record."""
        try:
            record = _decoder.decode(packed) if packed else _Packed()
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not a record of collectives: {error}") from None
        self.others = record.others
        """As given to ``packed``."""
        self._told = told
        self._calls: dict[str, deque[tuple[int, SetUpEntry]]] = {}
        for entry in record.entries:
            calls = self._calls.setdefault(entry.group, deque())
            calls.append((len(calls) + 1, entry))

    def next(self, group: str, header: bytes, place: str) -> SetUpEntry:
        """The entry of a call that this process makes at ``place``. Raises DifferenceError."""
        calls = self._calls.get(group)
        if not calls:
            raise DifferenceError(
                f"{place} calls {self._told(header)} {_of(group)} before the loop, and its predecessor made no such "
                "call there"
            )
        number, entry = calls.popleft()
        if entry.header != header:
            raise DifferenceError(
                f"{place} calls {self._told(header)} where its predecessor called {self._told(entry.header)} "
                f"({entry.place}): call {number} {_of(group)} before the loop"
            )
        return entry

    def next_weights(self, group: str) -> tuple[bytes | None, bool]:
        """The digest of those that the predecessor was handed in this group, and whether they had been others in it;
        None: it was not handed any.
        """
        calls = self._calls.get(_OF_WEIGHTS + group)
        if not calls:
            return None, False
        _, entry = calls.popleft()
        return entry.result, bool(entry.header)

    def next_left(self, place: str, count: int) -> bytes | None:
        """What the predecessor had of that line, of those ``count`` bytes; None: nothing."""
        calls = self._calls.get(_LEFT + place)
        data = calls.popleft()[1].result if calls else None
        return data if data is not None and len(data) == count else None

    def finish(self) -> None:
        """The loop begins. Raises DifferenceError if the predecessor had made more calls."""
        for group, calls in self._calls.items():
            if calls and not group.startswith((_OF_WEIGHTS, _LEFT)):
                number, entry = calls[0]
                raise DifferenceError(
                    f"it comes to the loop without {self._told(entry.header)}, call {number} {_of(group)}, which its "
                    f"predecessor made at {entry.place}"
                )


def _of(group: str) -> str:
    return "of a large result" if group == LARGE_RESULTS else f"of process group {group!r}"
