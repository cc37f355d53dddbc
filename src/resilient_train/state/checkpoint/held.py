"""Tensors out of shards that lie in memory, as ``restore.py`` takes them out of files."""

from __future__ import annotations

from collections.abc import Sequence

from resilient_train.errors import ConfigError, VaultError
from resilient_train.state.checkpoint.restore import Segment, segments_of
from resilient_train.state.checkpoint.target import Target
from resilient_train.state.image import LENGTH, Header, header_length, parse_header
from resilient_train.state.sharding import Block, Piece, uncovered


class HeldImage:
    """The image of one shard. ``name`` is for errors. Raises CheckpointError if it is none."""

    def __init__(self, name: str, image: memoryview) -> None:
        self.memory = image
        length = header_length(name, bytes(image[: LENGTH.size]), len(image))
        self.header: Header = parse_header(name, bytes(image[LENGTH.size : LENGTH.size + length]), len(image))


def fill_from(images: Sequence[HeldImage], targets: Sequence[Target]) -> int:
    """Fills the targets from the images, which together hold all of every tensor; returns the bytes copied.

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
    return sum(_copy(image, segment) for image in images for segment in segments_of(image.header, wanted))


def _copy(image: HeldImage, segment: Segment) -> int:
    segment.view(segment.start, segment.end)[:] = image.memory[segment.start : segment.end]
    segment.finish()
    return segment.end - segment.start
