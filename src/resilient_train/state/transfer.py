"""From a replica to a replacement: spans of memory, read out of the other process, verified by digest.

On the same host ``process_vm_readv`` reads the replica's tensors where they lie, straight into the replacement's own:
one copy, nothing published, nothing to clean up (157 against 264 ms for gloo at 500 MB, ``docs/facts.md``). It needs
the permission to trace; where a container forbids it, the bytes go over the rebuilt process group instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

from resilient_train import _native
from resilient_train.errors import TransferError


class Span(NamedTuple):
    """``size`` bytes at ``address`` of one process."""

    address: int
    size: int


def view(span: Span) -> memoryview:
    """The span as bytes of this process; the caller keeps the owner alive."""
    return memoryview((ctypes.c_ubyte * span.size).from_address(span.address)).cast("B")


def digest(payload: bytes, spans: Iterable[Span]) -> str:
    """xxh3-128 over a description and the bytes that it describes."""
    state = xxhash.xxh3_128(payload)
    for span in spans:
        if span.size:
            state.update(view(span))
    return state.hexdigest()


def read_from(pid: int, remote: list[Span], local: list[Span]) -> None:
    """Reads the spans of process ``pid``. Raises TransferError if they differ in shape, OSError as the kernel says."""
    if [span.size for span in remote] != [span.size for span in local]:
        raise TransferError("the replica's tensors have other sizes than this rank's")
    pairs = [(r.address, here.address, r.size) for r, here in zip(remote, local, strict=True) if r.size]
    _native.read_process_memory(pid, pairs)


def chunks(spans: Iterable[Span], chunk_bytes: int) -> Iterator[Span]:
    """The spans cut into pieces of at most ``chunk_bytes``."""
    for span in spans:
        for offset in range(0, span.size, chunk_bytes):
            yield Span(span.address + offset, min(chunk_bytes, span.size - offset))
