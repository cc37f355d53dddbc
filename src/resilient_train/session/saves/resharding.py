"""What a rank goes on from when the job had another number of ranks at its last save.

The replicated state is the same for any number. What each rank had of its own was that of the old ranks:

* A rank whose place in its replica group was there before takes up its own: random numbers, buffers, ``rank_state``.
* A new one takes the buffers of the group's first rank, and keeps the random numbers and ``rank_state`` that the script
  has given it. What ranks had that are no more is dropped.
* All go on at one place in the epoch, see ``_place``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from resilient_train.frameworks.roles import Data, RankState, Strides
from resilient_train.session.publication_format import Published
from resilient_train.session.redo.loader import Cursor


class _Place(NamedTuple):
    """Where the epoch goes on, and how it was found, for people."""

    epoch: int
    taken: int
    skipped: int
    found: dict[str, Any]


def reshard(
    rank_state: RankState, data: Data, cursor: Cursor, own: Published | None, first: Published
) -> tuple[bytes, dict[str, Any]]:
    """What this rank is to take up, and in words for the event how its place in the data was found.

    ``own`` is what the rank of its place had published in the old world, None if there was none; ``first`` that of the
    first rank of its group.
    """
    place = _place(cursor, data.strides(cursor.loader), first)
    base = _newcomer(rank_state, data, first) if own is None else own
    # As the script has made it, where the one of the old world says where it was.
    is_known = own is not None and not cursor.keeps_place(own.loader)
    loader = base.loader if is_known else cursor.own_of_newcomer(first.loader)
    there = {"epoch": place.epoch, "taken": place.taken, "skipped": place.skipped, "loader": loader}
    moved = msgspec.structs.replace(base, **there, called=b"", last=b"", drawn_from=b"", begun=b"", workers=b"")
    return msgspec.msgpack.encode(moved), place.found


def _place(cursor: Cursor, strides: Strides | None, first: Published) -> _Place:
    """The same on all ranks, so that their epochs end together.

    Where ranks divide one order among them (``Strides``), the old ones had used its first ``used`` samples. The new
    ones go on behind as many of them as divide by their own number; the rest, fewer than there are ranks, is used
    again, and none is left out. Batches may be of another size now.
    """
    is_over = cursor.is_over(first.loader)
    if is_over or (not first.taken and not first.skipped):
        epoch = first.epoch + is_over
        return _Place(epoch, 0, 0, {"loader": "an epoch began", "epoch": epoch})
    if cursor.keeps_place(first.loader):
        told = "its own state can't be divided anew: the epoch begins again"
        return _Place(first.epoch, 0, 0, {"loader": told, "epoch": first.epoch})
    if strides is None or not first.replicas:
        told = "each rank's own batches are counted: whether the ranks of now divide the data alike is not known"
        return _Place(first.epoch, first.taken, first.skipped, {"loader": told, "epoch": first.epoch})
    used = (first.skipped + first.taken * first.batch) * first.replicas
    skipped = used // strides.replicas
    again = used - skipped * strides.replicas
    found = {"loader": "by samples", "epoch": first.epoch, "used": used, "used_again": again}
    if skipped >= strides.samples:
        return _Place(first.epoch + 1, 0, 0, {**found, "epoch": first.epoch + 1, "used_again": 0})
    return _Place(first.epoch, 0, skipped, found)


def _newcomer(rank_state: RankState, data: Data, first: Published) -> Published:
    rank_state.adopt(first.rank)
    random = data.random_state()
    return msgspec.structs.replace(first, random=random, epoch_random=random, rank=rank_state.packed())
