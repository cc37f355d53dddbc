"""Tensors out of shards that lie in memory, as ``restore.py`` takes them out of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence

from resilient_train._native import Copier
from resilient_train.errors import ConfigError, VaultError
from resilient_train.state.checkpoint.segments import Segment, read_whole, segments_of
from resilient_train.state.checkpoint.target import BlockTarget
from resilient_train.state.image import LENGTH, Header, header_length, parse_header
from resilient_train.state.sharding import Block, Piece, overlap, uncovered
from resilient_train.state.vault.slots import image_digest


class HeldImage:
    """The image of one shard, which ends ``size_bytes`` behind ``start`` of an open memfd; ``name`` is for errors.

    ``digest``: as ``slots.image_digest``; empty: it has none. Raises CheckpointError if it is no image.
    """

    def __init__(self, name: str, fd: int, start: int, size_bytes: int, digest: bytes = b"") -> None:
        self.name = name
        self.fd = fd
        self.start = start
        self.size_bytes = size_bytes
        self.digest = digest
        length = header_length(name, os.pread(fd, LENGTH.size, start), size_bytes)
        self.header: Header = parse_header(name, os.pread(fd, length, start + LENGTH.size), size_bytes)


def fill_from(images: Sequence[HeldImage], targets: Sequence[BlockTarget], copier: Copier) -> int:
    """Fills the targets from the images, which together hold all of every tensor; returns the bytes copied.

    An image is hashed as it is copied: raises VaultError if it is damaged, and the targets hold rubbish then.

    Raises ConfigError for a tensor that is not there as it is wanted, VaultError if the images are not shares of one
    whole: snapshots of the same update may have been divided among other ranks, at a job's end.
    """
    pieces: dict[str, list[Piece]] = {}
    for place in (place for image in images for place in image.header.places):
        pieces.setdefault(place.piece.name, []).append(place.piece)
    wanted: dict[str, list[BlockTarget]] = {}
    for target in (each for each in targets if each.piece.size_bytes):  # of a divided tensor a rank may have none
        name, parts = target.piece.name, pieces.get(target.piece.name, [])
        if not parts or (parts[0].dtype, parts[0].global_shape) != (target.piece.dtype, target.piece.global_shape):
            raise ConfigError(f"the snapshots hold no {name!r} of {target.piece.global_shape}")
        if why := _lacking(target.piece, parts):
            raise VaultError(f"the snapshots do not hold tensor {name!r} whole: {why}")
        wanted.setdefault(name, []).append(target)
    return sum(_copy(image, list(segments_of(image.header, wanted)), copier) for image in images)


def _lacking(wanted: Piece, parts: Sequence[Piece]) -> str:
    """Why the parts do not cover what is wanted of their tensor exactly once; empty if they do."""
    block = Block(wanted.offsets, wanted.shape)
    found = [common for part in parts if (common := overlap(block, Block(part.offsets, part.shape)))]
    moved = [
        Block(tuple(at - begin for at, begin in zip(each.offsets, block.offsets, strict=True)), each.shape)
        for each in found
    ]
    return uncovered(wanted.shape, moved)


def _copy(image: HeldImage, segments: Sequence[Segment], copier: Copier) -> int:
    try:
        chunks = read_whole(image.fd, image.start, image.size_bytes, segments, copier)
    except OSError as error:
        raise VaultError(f"{image.name} can't be read: {error}") from None
    if image.digest and image_digest(chunks) != image.digest:
        raise VaultError(f"{image.name} is damaged: it has another digest than when it was taken")
    return sum(segment.end - segment.start for segment in segments)
