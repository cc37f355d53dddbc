"""What lies behind the image in a slot: all of a snapshot that is not a tensor, and the digests of the image's chunks.

It begins at the next multiple of 4096: the image in front of it is written to storage as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import msgspec
import xxhash

from resilient_train.errors import ProtocolError, TransferError
from resilient_train.state.vault.record import Snapshot

_BLOCK_BYTES = 4096
_HEADER = struct.Struct("<Q16s")
_DIGEST_BYTES = 16
_CHUNK_BYTES = 4 << 20
_HEAD_BYTES = 5
"""Of anything in msgpack, at most: of bytes, a text, a map. A number takes up to 9."""
_REST_BYTES = 4096
"""More than what does not grow: numbers, and the heads of what there is one of."""


class Trailer(msgspec.Struct, frozen=True, array_like=True):
    """``sequence`` and ``commits`` are the snapshot's: one that lags behind its record is found out."""

    sequence: int
    commits: int
    step: int
    tree: bytes
    """The replicated state without its tensors ..."""
    names: tuple[str, ...]
    """... and their names by number."""
    own: dict[int, bytes]
    """What only one rank has, by rank: this rank's, and at the job's end that of ranks which can't save theirs."""
    chunks: bytes
    """xxh3_128 of each 4 MiB of the image, joined."""
    fingerprint: int = 0
    """Of all parameters and optimizer state, of which the image is this rank's share; 0: it was not made."""

    def chunk_digests(self) -> list[bytes]:
        """One by one."""
        return [self.chunks[at : at + _DIGEST_BYTES] for at in range(0, len(self.chunks), _DIGEST_BYTES)]


def start_of(image_bytes: int) -> int:
    """Where the trailer begins."""
    return -(-image_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def size_bytes(image_bytes: int, tree: bytes, names: Iterable[str], own: Mapping[int, bytes]) -> int:
    """What a trailer with these takes at most."""
    named = sum(_HEAD_BYTES + len(name.encode()) for name in names)
    owned = sum(16 + len(each) for each in own.values())
    return len(tree) + named + owned + _DIGEST_BYTES * (image_bytes // _CHUNK_BYTES) + _REST_BYTES


def room_bytes(image_bytes: int, trailer_bytes: int) -> int:
    """What a slot must hold. Twice the trailer's present size: positions and settings grow a little."""
    return start_of(image_bytes) + _BLOCK_BYTES + 2 * trailer_bytes


def write(region: memoryview, image_bytes: int, packed: bytes) -> None:
    """Writes an encoded trailer behind the image. Raises TransferError if there is no room."""
    start = start_of(image_bytes)
    data = _HEADER.pack(len(packed), xxhash.xxh3_128_digest(packed)) + packed
    if start + len(data) > len(region):
        raise TransferError(
            f"there is no room for a trailer of {len(data)} bytes behind an image of {image_bytes} in a slot of "
            f"{len(region)}"
        )
    region[start : start + len(data)] = data


def read(region: memoryview, snapshot: Snapshot) -> Trailer:
    """The trailer of a snapshot, whose slot is ``region``. Raises ProtocolError if it is not whole, or another's."""
    start = start_of(snapshot.image_bytes)
    told = f"snapshot {snapshot.sequence} of rank {snapshot.rank}"
    if start + _HEADER.size > len(region):
        raise ProtocolError(f"{told} has no room for its trailer")
    length, digest = _HEADER.unpack_from(region, start)
    begin = start + _HEADER.size
    packed = bytes(region[begin : begin + length]) if length <= len(region) - begin else b""
    if xxhash.xxh3_128_digest(packed) != digest:
        raise ProtocolError(f"{told} is damaged behind its image")
    try:
        trailer = msgspec.msgpack.decode(packed, type=Trailer)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{told} can't be read: {error}") from None
    if (trailer.sequence, trailer.commits) != (snapshot.sequence, snapshot.commits):
        raise ProtocolError(f"{told} has the trailer of another one")
    return trailer
