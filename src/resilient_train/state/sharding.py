"""Pieces of tensors: who holds them, how replicas divide the work of writing them, where two of them overlap.

A *shard* is what one file of a checkpoint holds. Ranks that hold the same bytes (a replica group) divide them, so that
each writes its part and nothing is written twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

Shape = tuple[int, ...]

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""The element types that a checkpoint may hold, by their names in safetensors; bytes per element."""

SPLIT_MIN_BYTES = 1 << 20
"""Replicas cut no tensor below this size in two: a few more bytes for one of them cost less than another piece."""


class Piece(NamedTuple):
    """The block of a tensor that begins at ``offsets`` (in elements) and is ``shape`` large; row-major, contiguous."""

    name: str
    dtype: str
    shape: Shape
    global_shape: Shape
    offsets: Shape

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Share(NamedTuple):
    """A shard as a part of what a replica group holds, cut into ``of`` parts."""

    group: int
    part: int
    of: int
    holders: tuple[int, ...]
    """The group's ranks. The first one is to write this shard as long as all are alive."""


def shares(replica_groups: Sequence[Sequence[int]]) -> tuple[Share, ...]:
    """The shards of a job, one for each rank: each group's bytes in as many parts as the group has ranks."""
    return tuple(
        Share(number, part, len(group), (*group[part:], *group[:part]))
        for number, group in enumerate(replica_groups)
        for part in range(len(group))
    )


def divide(pieces: Sequence[Piece], parts: int) -> list[list[Piece]]:
    """The same bytes in ``parts`` parts of nearly equal size, in the same order; any two ranks come to the same result.

    A part may begin or end inside a tensor of at least ``SPLIT_MIN_BYTES``, between two of its rows.
    """
    total = sum(piece.size_bytes for piece in pieces)
    cuts = [total * part // parts for part in range(1, parts)]
    result: list[list[Piece]] = [[] for _ in range(parts)]
    part = begin = 0
    for piece in pieces:
        end = begin + piece.size_bytes
        rows, row_bytes = _rows(piece)
        splits = [0]
        owners = [part]
        while part < parts - 1 and cuts[part] < end:
            split = round((cuts[part] - begin) / row_bytes) if row_bytes else 0
            part += 1
            if split == splits[-1]:
                owners[-1] = part
            elif split < rows:
                splits.append(split)
                owners.append(part)
        for owner, (low, high) in zip(owners, pairwise([*splits, rows]), strict=True):
            result[owner].append(piece if (low, high) == (0, rows) else _slab(piece, low, high))
        begin = end
    return result


def _rows(piece: Piece) -> tuple[int, int]:
    """How many rows a piece can be cut into, and the size of one; (1, size) for one that stays whole."""
    if piece.size_bytes < SPLIT_MIN_BYTES or max(piece.shape, default=1) == 1:
        return 1, piece.size_bytes
    rows = piece.shape[_axis(piece)]
    return rows, piece.size_bytes // rows


def _axis(piece: Piece) -> int:
    """The first dimension that can be cut; what lies before it is 1, so that slabs stay contiguous."""
    return next((axis for axis, extent in enumerate(piece.shape) if extent > 1), 0)


def _slab(piece: Piece, low: int, high: int) -> Piece:
    axis = _axis(piece)
    shape = (*piece.shape[:axis], high - low, *piece.shape[axis + 1 :])
    offsets = (*piece.offsets[:axis], piece.offsets[axis] + low, *piece.offsets[axis + 1 :])
    return piece._replace(shape=shape, offsets=offsets)


class Block(NamedTuple):
    """A part of a tensor, without the tensor."""

    offsets: Shape
    shape: Shape


def overlap(one: Block, other: Block) -> Block | None:
    """What two blocks of the same tensor have in common; None if nothing."""
    low = tuple(map(max, one.offsets, other.offsets))
    high = tuple(
        min(a + s, b + t) for a, s, b, t in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )
    shape = tuple(h - at for h, at in zip(high, low, strict=True))
    return Block(low, shape) if all(extent > 0 for extent in shape) else None


def run_in(inner: Block, outer: Block) -> tuple[int, int] | None:
    """(first element, count) of ``inner`` in the row-major memory of ``outer``; None if it is not one run there."""
    trailing = len(outer.shape)
    while trailing and inner.shape[trailing - 1] == outer.shape[trailing - 1]:
        trailing -= 1
    if any(extent != 1 for extent in inner.shape[: max(trailing - 1, 0)]):
        return None
    first, stride = 0, 1
    for axis in reversed(range(len(outer.shape))):
        first += (inner.offsets[axis] - outer.offsets[axis]) * stride
        stride *= outer.shape[axis]
    return first, math.prod(inner.shape)


def uncovered(global_shape: Shape, blocks: Sequence[Block]) -> str:
    """Why blocks that lie inside a tensor do not cover it exactly once; empty if they do.

    They do if no two overlap and their sizes add up to the tensor's. Overlaps are looked for by a sweep along the
    dimension that has the most different offsets: n log n for rows or columns.
    """
    solid = [block for block in blocks if all(block.shape)]
    axes = range(len(global_shape))
    sweep = max(axes, key=lambda axis: len({block.offsets[axis] for block in solid}), default=None)
    if sweep is None:
        if len(solid) > 1:
            return f"{len(solid)} pieces of the same scalar"
    else:
        solid.sort(key=lambda block: block.offsets[sweep])
        active: list[Block] = []
        for block in solid:
            active = [other for other in active if other.offsets[sweep] + other.shape[sweep] > block.offsets[sweep]]
            for other in active:
                if overlap(block, other):
                    return f"the pieces at {list(other.offsets)} and {list(block.offsets)} overlap"
            active.append(block)
    held, needed = sum(math.prod(block.shape) for block in solid), math.prod(global_shape)
    return "" if held == needed else f"{held} of {needed} elements are there"
