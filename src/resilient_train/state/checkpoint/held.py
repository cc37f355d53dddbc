"""Tensors out of shards that lie in memory, as ``restore.py`` takes them out of files."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from resilient_train._native import Copier
from resilient_train.errors import ConfigError, VaultError
from resilient_train.state.capture import COPY_TIMEOUT_MS
from resilient_train.state.checkpoint.restore import Segment, segments_of
from resilient_train.state.checkpoint.target import Target
from resilient_train.state.image import LENGTH, Header, header_length, parse_header
from resilient_train.state.sharding import Block, Piece, uncovered
from resilient_train.state.vault.slots import image_digest


class HeldImage:
    """The image of one shard, and its digest (``slots.image_digest``; empty: it has none). ``name`` is for errors.

    Raises CheckpointError if it is none.
    """

    def __init__(self, name: str, image: memoryview, digest: bytes = b"") -> None:
        self.name = name
        self.memory = image
        self.digest = digest
        length = header_length(name, bytes(image[: LENGTH.size]), len(image))
        self.header: Header = parse_header(name, bytes(image[LENGTH.size : LENGTH.size + length]), len(image))


def fill_from(images: Sequence[HeldImage], targets: Sequence[Target], copier: Copier) -> int:
    """Fills the targets from the images, which together hold all of every tensor; returns the bytes copied.

    An image is hashed as it is copied: raises VaultError if it is damaged, and the targets hold rubbish then.

    Raises ConfigError for a tensor that is not there as it is wanted, VaultError if the images are not shares of one
    whole: snapshots of the same update may have been divided among other ranks, at a job's end.
    """
    pieces: dict[str, list[Piece]] = {}
    for place in (place for image in images for place in image.header.places):
        pieces.setdefault(place.piece.name, []).append(place.piece)
    for name, parts in pieces.items():
        why = uncovered(parts[0].global_shape, [Block(piece.offsets, piece.shape) for piece in parts])
        if why:
            raise VaultError(f"the snapshots do not hold tensor {name!r} whole: {why}")
    held = {name: parts[0] for name, parts in pieces.items()}
    wanted: dict[str, list[Target]] = {}
    for target in targets:
        piece = held.get(target.piece.name)
        if piece is None or (piece.dtype, piece.global_shape) != (target.piece.dtype, target.piece.global_shape):
            raise ConfigError(f"the snapshots hold no {target.piece.name!r} of {target.piece.global_shape}")
        wanted.setdefault(target.piece.name, []).append(target)
    return sum(_copy(image, list(segments_of(image.header, wanted)), copier) for image in images)


def _copy(image: HeldImage, segments: Sequence[Segment], copier: Copier) -> int:
    views = [(segment.view(segment.start, segment.end), segment.start) for segment in segments]
    pieces = [(_address_of(view), view.nbytes, start) for view, start in views if view.nbytes]
    copier.scatter(image.memory, pieces, hashed=bool(image.digest), owner=views)
    if not copier.wait(COPY_TIMEOUT_MS):
        copier.abort()
        raise VaultError(f"{image.name}: copying {image.memory.nbytes} bytes took over {COPY_TIMEOUT_MS} ms")
    if image.digest and image_digest(copier.digests()) != image.digest:
        raise VaultError(f"{image.name} is damaged: it has another digest than when it was taken")
    for segment in segments:
        segment.finish()
    return sum(size for _, size, _ in pieces)


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
