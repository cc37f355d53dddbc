"""What the holder does with snapshots on behalf of others: the seam for writing them to storage."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from resilient_train.errors import ConfigError
from resilient_train.state.vault import slots
from resilient_train.state.vault.record import Snapshot


class PinnedSnapshot(NamedTuple):
    """One snapshot, pinned until the work returns.

    ``region`` is all of its slot, read-only: it begins and ends at multiples of 64 KiB, so that the image in its first
    ``snapshot.image_bytes`` can be written as it is with O_DIRECT; behind it lies the trailer (``trailer.py``).
    """

    snapshot: Snapshot
    region: memoryview


class WorkOrder(NamedTuple):
    """One piece of work. Its snapshots are mapped until the work returns; keep no view of them."""

    parts: tuple[PinnedSnapshot, ...]
    argument: bytes


Work = Callable[[WorkOrder], bytes]
"""Runs in a thread of the holder, one at a time. What it raises is told to whoever asked, as text."""


Pinned = tuple[slots.Control, Snapshot]
"""A snapshot that stays, and the store that it lies in."""


def load(spec: str) -> tuple[str, Work]:
    """``NAME=MODULE:FUNCTION`` as (name, function). Raises ConfigError if there is no such function."""
    name, _, place = spec.partition("=")
    module, _, function = place.partition(":")
    try:
        return name, getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--work {spec}: {error}; write NAME=MODULE:FUNCTION") from None


def perform(work: Work, pinned: Sequence[Pinned], argument: bytes) -> bytes:
    """Runs ``work`` on pinned snapshots. Their images are mapped meanwhile only: the holder stays small."""
    with contextlib.ExitStack() as mapped:
        parts = []
        for store, snapshot in pinned:
            memory = mapped.enter_context(mmap.mmap(store.fd, store.size_bytes, prot=mmap.PROT_READ))
            whole = mapped.enter_context(memoryview(memory))
            stride = slots.stride_bytes(store.capacity_bytes)
            start = store.start_of(snapshot.slot)
            parts.append(PinnedSnapshot(snapshot, mapped.enter_context(whole[start : start + stride])))
        try:
            return work(WorkOrder(tuple(parts), argument))
        except Exception as error:
            _forget_views(error)
            raise


def _forget_views(error: BaseException | None) -> None:
    """The frames of an error's traceback keep views of the mapping, which could not be closed: that error would hide
    this one.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
