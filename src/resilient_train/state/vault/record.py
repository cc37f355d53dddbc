"""The record of a slot: what snapshot lies there, and whether it is complete.

80 bytes, little endian: state and flags (u32), sequence, commits, step, image bytes (u64), generation, world (u32),
time in ns (u64), digest of the image (16 bytes), xxh3_64 of all that. A record whose checksum is wrong says nothing:
its slot is empty. So a record that was cut while it was written counts for nothing, whatever of it arrived.
"""

from __future__ import annotations

import enum
import struct

import msgspec
import xxhash

_FIELDS = struct.Struct("<IIQQQQIIQ16s")
_CHECKSUM = struct.Struct("<Q")
RECORD_BYTES = _FIELDS.size + _CHECKSUM.size
COMMIT_BYTES = 8
"""State and flags: written last, in one store."""
_HASHED = 1


class SlotState(enum.IntEnum):
    """Of a slot."""

    EMPTY = 0
    WRITING = 1
    """Its image is being overwritten, or was when the writer died."""
    COMPLETE = 2
    DISCARDED = 3
    """Complete once; found damaged since, or of a history that the job has gone back behind."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's state at the start of update ``commits``, as an image of ``image_bytes``."""

    rank: int
    slot: int
    sequence: int
    """Counts the snapshots of the rank, from 1: the larger, the newer."""
    commits: int = 0
    step: int = 0
    image_bytes: int = 0
    generation: int = 0
    world: int = 0
    time_ns: int = 0
    """CLOCK_REALTIME of the commit."""
    digest: bytes = b""
    """xxh3_128 over the concatenated xxh3_128 digests of the image's chunks of 4 MiB; empty: it was not hashed."""


def pack(state: SlotState, snapshot: Snapshot) -> bytes:
    """The record, RECORD_BYTES long."""
    fields = _FIELDS.pack(
        state,
        _HASHED if snapshot.digest else 0,
        snapshot.sequence,
        snapshot.commits,
        snapshot.step,
        snapshot.image_bytes,
        snapshot.generation,
        snapshot.world,
        snapshot.time_ns,
        snapshot.digest,
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def unpack(data: bytes, rank: int, slot: int) -> tuple[SlotState, Snapshot]:
    """What the record says; (EMPTY, sequence 0) where its checksum is wrong."""
    fields, (checksum,) = data[: _FIELDS.size], _CHECKSUM.unpack_from(data, _FIELDS.size)
    state, flags, sequence, commits, step, image_bytes, generation, world, time_ns, digest = _FIELDS.unpack(fields)
    if checksum != xxhash.xxh3_64_intdigest(fields) or state > SlotState.DISCARDED:
        return SlotState.EMPTY, Snapshot(rank=rank, slot=slot, sequence=0)
    return SlotState(state), Snapshot(
        rank=rank,
        slot=slot,
        sequence=sequence,
        commits=commits,
        step=step,
        image_bytes=image_bytes,
        generation=generation,
        world=world,
        time_ns=time_ns,
        digest=digest if flags & _HASHED else b"",
    )
