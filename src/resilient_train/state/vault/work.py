"""What the holder does with a snapshot on behalf of others: the seam for writing it to storage."""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable
from typing import NamedTuple

from resilient_train.errors import ConfigError
from resilient_train.state.vault import slots
from resilient_train.state.vault.record import Snapshot


class Order(NamedTuple):
    """One piece of work. The snapshot is pinned, and ``region`` mapped, until the work returns; keep no view of it.

    ``region`` is all of its slot, read-only: it begins and ends at multiples of 64 KiB, so that the image in its first
    ``snapshot.image_bytes`` can be written as it is with O_DIRECT; behind it lies the trailer (``trailer.py``).
    """

    snapshot: Snapshot
    region: memoryview
    argument: bytes


Work = Callable[[Order], bytes]
"""Runs in a thread of the holder, one at a time. What it raises is told to whoever asked, as text."""


def load(spec: str) -> tuple[str, Work]:
    """``NAME=MODULE:FUNCTION`` as (name, function). Raises ConfigError if there is no such function."""
    name, _, place = spec.partition("=")
    module, _, function = place.partition(":")
    try:
        return name, getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--work {spec}: {error}; write NAME=MODULE:FUNCTION") from None


def perform(work: Work, store: slots.Control, snapshot: Snapshot, argument: bytes) -> bytes:
    """Runs ``work`` on a pinned snapshot. The image is mapped meanwhile only: the holder stays small."""
    with mmap.mmap(store.fd, store.size_bytes, prot=mmap.PROT_READ) as memory:
        start = slots.ALIGNMENT_BYTES + snapshot.slot * slots.stride_bytes(store.capacity_bytes)
        with memoryview(memory) as whole, whole[start : start + slots.stride_bytes(store.capacity_bytes)] as region:
            return work(Order(snapshot, region, argument))
