"""Tensors out of a checkpoint into memory that is there already, whatever layout wrote it; digests on arrival."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from resilient_train.errors import CheckpointError, ConfigError
from resilient_train.state.checkpoint.manifest import FileEntry, Manifest, TreeFile
from resilient_train.state.checkpoint.reading import Folder, parts
from resilient_train.state.checkpoint.target import Target
from resilient_train.state.checkpoint.verify import verify
from resilient_train.state.digest import CHUNK_BYTES, tree_digest
from resilient_train.state.image import Header
from resilient_train.state.sharding import ITEM_BYTES, Block, Piece, overlap, run_in

_VIEWS_PER_CALL = 512
"""Below IOV_MAX (1024)."""


class Checkpoint:
    """A checkpoint that is to be read. Made by ``read_checkpoint``; close it, or use it as a context manager."""

    def __init__(self, folder: Folder, manifest: Manifest, headers: tuple[Header, ...]) -> None:
        self._folder = folder
        self.manifest = manifest
        self._headers = headers
        self._parts = parts(manifest)
        self.tensors: Mapping[str, Piece] = {
            piece.name: Piece(piece.name, piece.dtype, piece.global_shape, piece.global_shape, (0,) * len(piece.shape))
            for header in headers
            for piece, _ in header.places
        }
        """All tensors, each as one whole piece."""

    @property
    def path(self) -> Path:
        return self._folder.path

    def tree(self, group: int = 0) -> TreeFile:
        """The state of a replica group without its tensors. Raises CheckpointError."""
        return self._folder.tree(self._parts.trees[group], self.manifest, group)

    def rank_state(self, rank: int) -> bytes | None:
        """What only this rank of the old world had; None if it was lost with the rank. Raises CheckpointError."""
        entry = self._parts.ranks.get(rank)
        return None if entry is None else self._folder.rank(entry, self.manifest, rank).own

    def load(self, targets: Sequence[Target], *, digests: bool = True) -> int:
        """Fills the targets; returns how many bytes were read from storage.

        ``digests``: each file that holds a part of a target is read whole, once, and its digest compared. Without
        (somebody has verified it already), only what is wanted is read. Raises ConfigError, before anything is written,
        for a target that the checkpoint does not hold; CheckpointError for a damaged file: the targets hold rubbish
        then.
        """
        wanted: dict[str, list[Target]] = {}
        for target in targets:
            self._check(target)
            wanted.setdefault(target.piece.name, []).append(target)
        total = 0
        for entry, header in zip(self._parts.shards, self._headers, strict=True):
            segments = list(segments_of(header, wanted))
            if not segments:
                continue
            with self._folder.opened(entry.name) as (fd, size):
                if size != entry.size_bytes:
                    raise CheckpointError(entry.name, f"has {size} bytes instead of {entry.size_bytes}")
                total += _read_whole(fd, entry, segments) if digests else _read_wanted(fd, entry, segments)
        return total

    def _check(self, target: Target) -> None:
        piece, held = target.piece, self.tensors.get(target.piece.name)
        if held is None:
            raise ConfigError(f"{self.path} holds no tensor {piece.name!r}")
        if (held.dtype, held.global_shape) != (piece.dtype, piece.global_shape):
            raise ConfigError(
                f"{self.path} holds {piece.name!r} as {held.dtype} {list(held.shape)}, here it is {piece.dtype} "
                f"{list(piece.global_shape)}"
            )
        assert target.memory.nbytes == piece.size_bytes

    def close(self) -> None:
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint after all checks but the tensors' digests. Raises CheckpointError."""
    report = verify(path, digests=False)
    report.raise_if_broken()
    assert report.manifest is not None
    return Checkpoint(Folder(path), report.manifest, report.headers)


class Segment:
    """Bytes of a file that are wanted, and where they go: straight there, or through a scratch that is spread out."""

    def __init__(
        self, start: int, size: int, memory: memoryview | None, spread: Sequence[tuple[Block, Target]]
    ) -> None:
        self.start = start
        self.end = start + size
        self._memory = memory
        self._spread = spread
        self._block: Piece | None = None

    @classmethod
    def through_scratch(cls, start: int, piece: Piece, spread: Sequence[tuple[Block, Target]]) -> Segment:
        segment = cls(start, piece.size_bytes, None, spread)
        segment._block = piece
        return segment

    def view(self, begin: int, end: int) -> memoryview:
        """The memory for these bytes of the file."""
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


def segments_of(header: Header, wanted: Mapping[str, Sequence[Target]]) -> Iterator[Segment]:
    """What of one file is wanted, in the order of the file."""
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


def _read_whole(fd: int, entry: FileEntry, segments: Sequence[Segment]) -> int:
    """Reads a file chunk by chunk, wanted bytes to their place and the rest into a buffer; compares the digest."""
    rest = memoryview(bytearray(min(CHUNK_BYTES, entry.size_bytes)))
    chunks: list[bytes] = []
    number = 0
    for begin in range(0, entry.size_bytes, CHUNK_BYTES):
        end = min(begin + CHUNK_BYTES, entry.size_bytes)
        views: list[memoryview] = []
        at, done = begin, number
        while at < end:
            segment = segments[number] if number < len(segments) else None
            if segment is None or segment.start > at:
                stop = end if segment is None else min(segment.start, end)
                views.append(rest[at - begin : stop - begin])
            else:
                stop = min(segment.end, end)
                views.append(segment.view(at, stop))
                number += stop == segment.end
            at = stop
        _fill(fd, views, begin, entry.name)
        state = xxhash.xxh3_128()
        for view in views:
            state.update(view)
        chunks.append(state.digest())
        for segment in segments[done:number]:
            segment.finish()
    if (found := tree_digest(chunks)) != entry.digest:
        raise CheckpointError(entry.name, f"is damaged: its digest is {found}, not {entry.digest}")
    return entry.size_bytes


def _read_wanted(fd: int, entry: FileEntry, segments: Sequence[Segment]) -> int:
    for segment in segments:
        for begin in range(segment.start, segment.end, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, segment.end)
            _fill(fd, [segment.view(begin, end)], begin, entry.name)
        segment.finish()
    return sum(segment.end - segment.start for segment in segments)


def _fill(fd: int, views: Sequence[memoryview], offset: int, file: str) -> None:
    """Reads the views full, one after the other."""
    for first in range(0, len(views), _VIEWS_PER_CALL):
        left = list(views[first : first + _VIEWS_PER_CALL])
        while left:
            count = os.preadv(fd, left, offset)
            if not count:
                raise CheckpointError(file, f"ends at byte {offset}")
            offset += count
            while left and count >= left[0].nbytes:
                count -= left.pop(0).nbytes
            if count:
                left[0] = left[0][count:]
