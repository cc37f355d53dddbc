"""Where a part of a saved tensor is wanted."""

from __future__ import annotations

from typing import NamedTuple

from resilient_train.state.sharding import Piece


class BlockTarget(NamedTuple):
    """Where a block of a tensor is wanted: ``memory`` is writable, row-major, and exactly as large as the block."""

    piece: Piece
    memory: memoryview
