"""The frames between the holder and its clients (agent, ranks, commands): msgspec structs, as in ``protocol/messages``.

A client asks one thing at a time and gets one answer; only ``Submit`` has none, and ``Result`` comes whenever work is
done. Descriptors travel beside the frame that says how many they are.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from resilient_train.state.vault.record import Snapshot

VERSION = 4
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Size = Annotated[int, msgspec.Meta(gt=0, le=1 << 44)]


class Attach(msgspec.Struct, tag=True, frozen=True):
    """First frame of a client. The holder lives as long as it has members; a visitor does not keep it alive.
    Acknowledged answers: from then on a member can rely on it.
    """

    member: bool
    version: int = VERSION


class ReserveStore(msgspec.Struct, tag=True, frozen=True):
    """The client is the writer of ``rank`` and wants slots for images of up to ``image_bytes``; Stores with one store
    answers. What the rank has already is handed out again if it is large enough.
    """

    rank: _Rank
    image_bytes: _Size


class OpenStores(msgspec.Struct, tag=True, frozen=True):
    """Stores answers, with all that is held for ``rank``, newest first."""

    rank: _Rank


class Adopt(msgspec.Struct, tag=True, frozen=True):
    """A store of which the client has a descriptor, which comes along: the holder before this one is dead. Acknowledged
    answers.
    """


class Pin(msgspec.Struct, tag=True, frozen=True):
    """The snapshot must stay until Unpin, or until the client is gone. Acknowledged answers, or Denied if it is not
    there.
    """

    rank: _Rank
    sequence: int


class Unpin(msgspec.Struct, tag=True, frozen=True):
    """Takes one Pin back. Acknowledged answers."""

    rank: _Rank
    sequence: int


class Drop(msgspec.Struct, tag=True, frozen=True):
    """Nothing is held for ``rank`` any more. Acknowledged answers. Memory is free when nobody maps it any longer."""

    rank: _Rank


class AskInventory(msgspec.Struct, tag=True, frozen=True):
    """Inventory answers."""


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Work on snapshots (writing them to storage): all of them are pinned, or none, until the work is over. ``number``
    is the client's, for the Result that follows. The work goes on when the client is gone.
    """

    number: int
    work: str
    snapshots: tuple[tuple[_Rank, int], ...]
    """Rank and sequence of each."""
    argument: bytes


class LastWork(msgspec.Struct, tag=True, frozen=True):
    """What the holder does by itself where nobody has come in its grace time: this work, on the newest snapshots that
    all ranks 0..``world``-1 have of one update. ``work`` empty: nothing. Acknowledged answers.
    """

    work: str
    world: int
    argument: bytes
    unless: str
    """A file: nothing is done where it is gone, or somebody has a lock on it: another launcher, which has begun from
    something else.
    """
    until: int = -1
    """A step: snapshots from behind it are wrong, and don't count. -1: none is."""


class DoLastWork(msgspec.Struct, tag=True, frozen=True):
    """Somebody has come who can't take up what is held, but would if it were on storage: the last work is done now. It
    stays what it is, and Result answers when it is over, or is impossible. ``until``: as in LastWork, known since.
    """

    number: int
    until: int = -1


class JobOver(msgspec.Struct, tag=True, frozen=True):
    """The job is over: when its members are gone and work is done, the holder ends without its grace time, or last
    work. Acknowledged answers.
    """


class Store(msgspec.Struct, frozen=True):
    """One pair of slots. ``snapshots`` are the complete ones, newest first; ``sequence`` the last that was begun."""

    rank: int
    identity: str
    capacity_bytes: int
    backed_bytes: int
    sequence: int
    snapshots: tuple[Snapshot, ...]


class Stores(msgspec.Struct, tag=True, frozen=True):
    """As many descriptors as stores come along. ``sequence``: the last that was begun in any store of the rank."""

    stores: tuple[Store, ...]
    sequence: int = 0


class Inventory(msgspec.Struct, tag=True, frozen=True):
    """All that is held, without descriptors; ``works``: submitted and not over; ``last``: what the holder is left with,
    if that is anything.
    """

    pid: int
    stores: tuple[Store, ...]
    members: int
    works: int
    last: LastWork | None = None


class Acknowledged(msgspec.Struct, tag=True, frozen=True):
    """It is so."""


class Result(msgspec.Struct, tag=True, frozen=True):
    """Work is over, or was refused. ``error`` is empty when it went well."""

    number: int
    value: bytes
    error: str


class Denied(msgspec.Struct, tag=True, frozen=True):
    """It can't be. ``cause`` is ``memory`` (the limit is too small), ``gone`` (no such snapshot), ``wrong`` (the
    request).
    """

    cause: str
    text: str


ToHolder = (
    Attach | ReserveStore | OpenStores | Adopt | Pin | Unpin | Drop | AskInventory | Submit
    | LastWork | DoLastWork | JobOver
)  # fmt: skip
"""Every frame that the holder reads."""

FromHolder = Stores | Inventory | Acknowledged | Result | Denied
"""Every frame that a client reads."""
