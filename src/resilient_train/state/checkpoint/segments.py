"""Bytes of an image that lies in a file, to where they are wanted: a shard on storage, or a snapshot in a memfd."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from resilient_train._native import Copier
from resilient_train.state.capture import COPY_TIMEOUT_MS
from resilient_train.state.checkpoint.target import BlockTarget
from resilient_train.state.digest import CHUNK_BYTES
from resilient_train.state.image import Header
from resilient_train.state.sharding import ITEM_BYTES, Block, Piece, overlap, run_in

_BATCH_BYTES = 64 * CHUNK_BYTES
"""Read at once: so much of the state, and a tensor more, is held twice where it has to be spread out."""


class Segment:
    """Bytes of an image that are wanted, and where they go: straight there, or through a scratch that is spread out."""

    def __init__(
        self, start: int, size: int, memory: memoryview | None, spread: Sequence[tuple[Block, BlockTarget]]
    ) -> None:
        self.start = start
        self.end = start + size
        self._memory = memory
        self._spread = spread
        self._block: Piece | None = None

    @classmethod
    def through_scratch(cls, start: int, piece: Piece, spread: Sequence[tuple[Block, BlockTarget]]) -> Segment:
        segment = cls(start, piece.size_bytes, None, spread)
        segment._block = piece
        return segment

    def view(self, begin: int, end: int) -> memoryview:
        """The memory for these bytes of the image."""
        if self._memory is None:
            self._memory = memoryview(bytearray(self.end - self.start))
        return self._memory[begin - self.start : end - self.start]

    def finish(self) -> None:
        """All of it has been read: copies the scratch to its targets, and lets it go."""
        if self._block is None:
            return
        assert self._memory is not None
        piece = self._block
        item = np.dtype((np.void, ITEM_BYTES[piece.dtype]))
        source = np.frombuffer(self._memory, item).reshape(piece.shape)
        for common, target in self._spread:
            landing = np.frombuffer(target.memory, item).reshape(target.piece.shape)
            landing[_slices(common, target.piece)] = source[_slices(common, piece)]
        self._memory = None


def _slices(common: Block, piece: Piece) -> tuple[slice, ...]:
    return tuple(
        slice(at - base, at - base + extent)
        for at, extent, base in zip(common.offsets, common.shape, piece.offsets, strict=True)
    )


def segments_of(header: Header, wanted: Mapping[str, Sequence[BlockTarget]]) -> Iterator[Segment]:
    """What of one image is wanted, in its order."""
    for piece, start in header.places:
        block = Block(piece.offsets, piece.shape)
        spread = [
            (common, target)
            for target in wanted.get(piece.name, ())
            if (common := overlap(block, Block(target.piece.offsets, target.piece.shape)))
        ]
        if not spread:
            continue
        item = ITEM_BYTES[piece.dtype]
        common, target = spread[0]
        here = run_in(common, block)
        there = run_in(common, Block(target.piece.offsets, target.piece.shape))
        if len(spread) == 1 and here and there:
            size = math.prod(common.shape) * item
            memory = target.memory[there[0] * item : there[0] * item + size]
            yield Segment(start + here[0] * item, size, memory, ())
        else:
            yield Segment.through_scratch(start, piece, spread)


def read_whole(fd: int, start: int, size: int, segments: Sequence[Segment], copier: Copier) -> bytes:
    """Reads all of the image of ``size`` bytes at ``start`` once, and what is wanted to its place.

    Returns the digests of its chunks, joined. Raises OSError; the targets hold rubbish then, as they do if a digest is
    wrong.
    """
    digests: list[bytes] = []
    first = 0
    for begin in range(0, size, _BATCH_BYTES):
        end = min(begin + _BATCH_BYTES, size)
        last = first
        while last < len(segments) and segments[last].start < end:
            last += 1
        _read(fd, start, begin, end, segments[first:last], copier, hashed=True)
        digests.append(copier.digests())
        while first < last and segments[first].end <= end:
            segments[first].finish()
            first += 1
    return b"".join(digests)


def read_wanted(fd: int, segments: Sequence[Segment], copier: Copier) -> int:
    """Reads what is wanted of the image that a file begins with, and no more; returns how much. Raises OSError."""
    for segment in segments:
        _read(fd, 0, segment.start, segment.end, [segment], copier, hashed=False)
        segment.finish()
    return sum(segment.end - segment.start for segment in segments)


def _read(
    fd: int, start: int, begin: int, end: int, segments: Sequence[Segment], copier: Copier, *, hashed: bool
) -> None:
    bounds = [(max(begin, each.start), min(end, each.end)) for each in segments]
    views = [each.view(*bound) for each, bound in zip(segments, bounds, strict=True)]
    pieces = [
        (_address_of(view), view.nbytes, at - begin) for view, (at, _) in zip(views, bounds, strict=True) if view.nbytes
    ]
    copier.read(fd, start + begin, end - begin, pieces, hashed=hashed, owner=views)
    if not copier.wait(COPY_TIMEOUT_MS):
        copier.abort()
        raise TimeoutError(f"{end - begin} bytes took over {COPY_TIMEOUT_MS} ms")


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
