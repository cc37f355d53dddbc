"""The digest of a file, and of the memory that becomes one: a tree of two levels, so that no part waits for another.

A file is cut into chunks of ``CHUNK_BYTES``, the last one shorter. Its digest is xxh3-128 over the chunks' xxh3-128
digests in canonical (big-endian) order, one after the other. Several threads, or a copy that hashes what it copies, can
compute the chunks in any order; a file of no bytes has no chunks.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from resilient_train._native import DIGEST_CHUNK_BYTES, Copier

CHUNK_BYTES = DIGEST_CHUNK_BYTES
_SLICE_MS = 1_000


def chunk_digests(data: bytes | bytearray | memoryview) -> list[bytes]:
    """The digests, 16 bytes each, of the chunks of a contiguous buffer."""
    view = memoryview(data).cast("B")
    return [xxhash.xxh3_128_digest(view[start : start + CHUNK_BYTES]) for start in range(0, view.nbytes, CHUNK_BYTES)]


def tree_digest(chunks: Iterable[bytes]) -> str:
    """The digest of the whole, 32 hexadecimal digits, from those of its chunks in their order."""
    return xxhash.xxh3_128_hexdigest(b"".join(chunks))


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """``tree_digest`` of a contiguous buffer."""
    return tree_digest(chunk_digests(data))


def file_digest(fd: int, size_bytes: int) -> str:
    """``tree_digest`` of a file of that size, read in one pass on two threads. Raises OSError."""
    copier = Copier()
    copier.read(fd, 0, size_bytes, [])
    while not copier.wait(_SLICE_MS):
        pass  # storage may be slow
    return tree_digest([copier.digests()])
