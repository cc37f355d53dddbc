"""A shard's file as it lies in memory: a plain safetensors file, so that a memory slot is written out as it is.

The header's length, and with it every offset, is known before the first value: only the step, a number of fixed width,
changes from one snapshot to the next. The metadata carries ``DCP_SHARDING_INFO``, from which torch's
``HuggingFaceStorageReader`` learns where in the whole tensor each piece belongs.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from resilient_train.errors import CheckpointError, StateError
from resilient_train.state.sharding import ITEM_BYTES, Piece, Shape

BLOCK_BYTES = 4096
"""Unit of direct I/O: tensors begin at a multiple of it, and a slot is rounded up to one."""
MAX_HEADER_BYTES = 100_000_000
"""That of the safetensors library; of the JSON part."""
LENGTH = struct.Struct("<Q")
"""The header's length in front of it."""

METADATA = "__metadata__"
STEP = "resilient_train.step"
SHARD = "resilient_train.shard"
_SHARDING = "DCP_SHARDING_INFO"
_STEP_DIGITS = 20
_MAX_EXTENT = (1 << 63) - 1
_MAX_DIMENSIONS = 64


class PlacedPiece(NamedTuple):
    """A piece, and where in the file its bytes begin."""

    piece: Piece
    start: int


class ImagePlan:
    """Where everything lies in the image of one shard. Made by ``plan_image``."""

    def __init__(self, places: tuple[PlacedPiece, ...], template: bytes, step_at: int) -> None:
        self.places = places
        self._template = template
        self._step_at = step_at
        self.data_start = len(template)
        """Where the first tensor begins: a multiple of ``BLOCK_BYTES``."""
        self.total_bytes = self.data_start + sum(place.piece.size_bytes for place in places)
        """The exact size of the file."""
        self.capacity_bytes = -(-self.total_bytes // BLOCK_BYTES) * BLOCK_BYTES
        """What a slot must hold for direct I/O."""

    def header(self, step: int) -> bytes:
        """The first ``data_start`` bytes of the image of step ``step``."""
        assert 0 <= step <= _MAX_EXTENT
        digits = b"%0*d" % (_STEP_DIGITS, step)
        return self._template[: self._step_at] + digits + self._template[self._step_at + _STEP_DIGITS :]


def plan_image(pieces: Sequence[Piece], shard: int, shards: int) -> ImagePlan:
    """Lays out shard ``shard`` of ``shards``. Raises StateError for names that no file can hold.

    Safetensors allows no holes between tensors. Those whose size is a multiple of the largest power of two come first,
    so each begins at a multiple of its own such power: large matrices at whole pages, and every element aligned.
    Pieces without elements are left out, unless the tensor itself has none: a reader finds pieces by their offsets,
    which an empty one may share with its neighbour.
    """
    kept = [piece for piece in pieces if piece.size_bytes or not math.prod(piece.global_shape)]
    kept.sort(key=lambda piece: -_alignment(piece.size_bytes))
    _check_names(kept)
    sharding = {p.name: {"saved_offsets": list(p.offsets), "global_shape": list(p.global_shape)} for p in kept}
    placeholder = "0" * _STEP_DIGITS
    metadata = {
        STEP: placeholder,  # first, so that nothing that looks like it can stand before it
        SHARD: f"{shard}/{shards}",
        "format": "pt",
        "DCP_VERSION": "1.0",
        _SHARDING: json.dumps(sharding, separators=(",", ":")),
    }
    header: dict[str, Any] = {METADATA: metadata}
    relative, end = [], 0
    for piece in kept:
        relative.append(end)
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [end, end + piece.size_bytes],
        }
        end += piece.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    used = LENGTH.size + len(text)
    data_start = -(-used // BLOCK_BYTES) * BLOCK_BYTES
    if data_start - LENGTH.size > MAX_HEADER_BYTES:
        raise StateError(f"{len(kept)} tensors: their names and shapes need {used} bytes, which safetensors forbids")
    template = LENGTH.pack(data_start - LENGTH.size) + text + b" " * (data_start - used)
    places = tuple(PlacedPiece(piece, data_start + start) for piece, start in zip(kept, relative, strict=True))
    return ImagePlan(places, template, template.index(placeholder.encode()))


def _alignment(size_bytes: int) -> int:
    """The largest power of two, up to ``BLOCK_BYTES``, that divides a size."""
    return min(size_bytes & -size_bytes, BLOCK_BYTES) if size_bytes else BLOCK_BYTES


def _check_names(pieces: Sequence[Piece]) -> None:
    names: set[str] = set()
    for piece in pieces:
        if not piece.name or piece.name == METADATA or not piece.name.isprintable():
            raise StateError(f"{piece.name!r} can't be the name of a tensor in a checkpoint")
        if piece.name in names:
            raise StateError(f"there are two tensors {piece.name!r} in one shard")
        names.add(piece.name)


class Header(NamedTuple):
    """What a shard's file says of itself."""

    places: tuple[PlacedPiece, ...]
    """In the order of the file."""
    step: int
    shard: int
    shards: int


def header_length(file: str, first: bytes, file_bytes: int) -> int:
    """The length of the JSON part, from the first 8 bytes of a file. Raises CheckpointError."""
    if len(first) < LENGTH.size:
        raise CheckpointError(file, f"{file_bytes} bytes are no safetensors file")
    (length,) = LENGTH.unpack(first)
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH.size):
        raise CheckpointError(file, f"says that its header has {length} bytes; the file has {file_bytes}")
    return int(length)


def parse_header(file: str, text: bytes, file_bytes: int) -> Header:
    """The header of a shard that this library wrote. Believes nothing; raises CheckpointError that names the fault."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_refuse)
        metadata = header.pop(METADATA)
        sharding = json.loads(metadata[_SHARDING], object_pairs_hook=_unique, parse_constant=_refuse)
        step, shard, shards = int(metadata[STEP]), *map(int, metadata[SHARD].split("/"))
        places = _places(header, sharding, LENGTH.size + len(text))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(file, f"has a wrong header: {type(error).__name__}: {str(error)[:300]}") from None
    end = places[-1].start + places[-1].piece.size_bytes if places else LENGTH.size + len(text)
    if end != file_bytes:
        raise CheckpointError(file, f"holds tensors up to byte {end}, and {file_bytes} bytes")
    return Header(places, step, shard, shards)


def _places(header: dict[str, Any], sharding: dict[str, Any], data_start: int) -> tuple[PlacedPiece, ...]:
    if sharding.keys() != header.keys():
        raise ValueError(f"{_SHARDING} tells of other tensors than the header")
    places = []
    for name, entry in header.items():
        if entry.keys() != {"dtype", "shape", "data_offsets"} or sharding[name].keys() != {
            "saved_offsets",
            "global_shape",
        }:
            raise ValueError(f"{name!r} has other fields than it must have")
        if entry["dtype"] not in ITEM_BYTES:
            raise ValueError(f"{name!r} has the unknown dtype {entry['dtype']!r}")
        shape, offsets, whole = map(
            _extents, (entry["shape"], sharding[name]["saved_offsets"], sharding[name]["global_shape"])
        )
        begin, end = _extents(entry["data_offsets"])
        piece = Piece(name, entry["dtype"], shape, whole, offsets)
        if not len(shape) == len(offsets) == len(whole) or any(
            at + extent > limit for at, extent, limit in zip(offsets, shape, whole, strict=True)
        ):
            raise ValueError(f"{name!r}: {list(shape)} at {list(offsets)} does not lie in {list(whole)}")
        if end - begin != piece.size_bytes:
            raise ValueError(f"{name!r} has {end - begin} bytes instead of {piece.size_bytes}")
        places.append(PlacedPiece(piece, data_start + begin))
    places.sort(key=lambda place: (place.start, place.piece.size_bytes))
    at = data_start
    for place in places:
        if place.start != at:
            raise ValueError(f"{place.piece.name!r} begins at byte {place.start} instead of {at}: a hole or an overlap")
        at += place.piece.size_bytes
    return tuple(places)


def _extents(values: Any) -> Shape:
    if type(values) is not list or len(values) > _MAX_DIMENSIONS:
        raise ValueError(f"{str(values)[:50]} is no list of sizes")
    for value in values:
        if type(value) is not int or not 0 <= value <= _MAX_EXTENT:
            raise ValueError(f"{str(value)[:50]} is no size")
    return tuple(values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Two values of one key: readers differ in which they take."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} stands there twice")
        result[key] = value
    return result


def _refuse(text: str) -> None:
    raise ValueError(f"{text[:50]} is no size")
