"""The replicated state of a rank as snapshots and checkpoints hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from resilient_train.frameworks.base import Image, Share
from resilient_train.frameworks.torch.checkpoint import contents, copies, piece_of
from resilient_train.frameworks.torch.leaves import dense
from resilient_train.frameworks.torch.replicated import Replicated
from resilient_train.state.checkpoint.target import Target
from resilient_train.state.image import ImagePlan, plan_image
from resilient_train.state.sharding import Piece, divide

_BUFFERS = "buffers."
"""How the names of buffers begin: a forward pass writes them, so they are copied at once."""


class Saved:
    """Describes the state for a copy, and takes a copy up."""

    def __init__(self, replicated: Replicated) -> None:
        self._replicated = replicated
        self._plan: tuple[Share, list[Piece], ImagePlan] | None = None

    def image(self, step: int, share: Share) -> Image:
        """See ``frameworks/base.Framework``."""
        held = contents(self._replicated.tree())
        tensors = {name: _still(name, tensor) for name, tensor in held.tensors.items()}
        pieces = divide([piece_of(name, tensor) for name, tensor in tensors.items()], share.parts)[share.part]
        plan = self._planned(share, pieces)
        header = np.frombuffer(bytearray(plan.header(step)), dtype=np.uint8)
        copied = [(copy.source.address, copy.source.size, copy.start) for copy in copies(plan, tensors)]
        places = [(header.ctypes.data, header.nbytes, 0), *(each for each in copied if each[1])]
        return Image(plan.total_bytes, places, held.payload, tuple(held.tensors), (header, tensors))

    def _planned(self, share: Share, pieces: list[Piece]) -> ImagePlan:
        if self._plan is None or self._plan[:2] != (share, pieces):
            self._plan = share, pieces, plan_image(pieces, share.shard, share.shards)
        return self._plan[2]

    def load(self, tree: bytes, names: Sequence[str], fill: Callable[[Sequence[Target]], object]) -> None:
        """See ``frameworks/base.Framework``."""
        self._replicated.take_up(tree, names, fill)


def _still(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one piece in this process's memory; a copy of what changes before the next update."""
    return tensor.detach().to("cpu", copy=True).contiguous() if name.startswith(_BUFFERS) else dense(tensor)
