"""The replicated state of a rank as snapshots and checkpoints hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from resilient_train._native import Copier
from resilient_train.frameworks.base import Image, Share
from resilient_train.frameworks.torch.checkpoint import contents, copies, local, piece_of, skipped_bytes
from resilient_train.frameworks.torch.replicated import Replicated
from resilient_train.frameworks.torch.staging import Part, on_host
from resilient_train.state.capture import Capture, HostCapture
from resilient_train.state.checkpoint.target import Target
from resilient_train.state.image import ImagePlan, plan_image
from resilient_train.state.sharding import Piece, divide

_Begin = Callable[[memoryview, Copier], Capture]
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
        pieces = divide([piece_of(name, tensor) for name, tensor in held.tensors.items()], share.parts)[share.part]
        plan = self._planned(share, pieces)
        mine = [place.piece.name for place in plan.places]
        tensors = {name: _still(name, held.tensors[name]) for name in mine}
        begin = self._on_host if all(map(on_host, tensors.values())) else self._on_device
        return Image(plan.total_bytes, begin(plan, plan.header(step), tensors), held.payload, tuple(held.tensors))

    def _on_host(self, plan: ImagePlan, header: bytes, tensors: Mapping[str, torch.Tensor]) -> _Begin:
        first = np.frombuffer(bytearray(header), dtype=np.uint8)
        copied = [(copy.source.address, copy.source.size, copy.start) for copy in copies(plan, tensors)]
        places = [(first.ctypes.data, first.nbytes, 0), *(each for each in copied if each[1])]
        return partial(HostCapture, places, (first, tensors))

    def _on_device(self, plan: ImagePlan, header: bytes, tensors: Mapping[str, torch.Tensor]) -> _Begin:
        first = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        parts = [Part(first, 0, len(first))]
        for piece, _ in plan.places:
            tensor = tensors[piece.name]
            parts.append(Part(local(tensor), skipped_bytes(piece, tensor), piece.size_bytes))
        return partial(self._replicated.staging.capture, parts)

    def _planned(self, share: Share, pieces: list[Piece]) -> ImagePlan:
        if self._plan is None or self._plan[:2] != (share, pieces):
            self._plan = share, pieces, plan_image(pieces, share.shard, share.shards)
        return self._plan[2]

    def load(self, tree: bytes, names: Sequence[str], fill: Callable[[Sequence[Target]], object]) -> None:
        """See ``frameworks/base.Framework``."""
        self._replicated.take_up(tree, names, fill)


def _still(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory in one piece, where it lies; a copy of what changes before the next update."""
    tensor = tensor.detach()
    return tensor.clone(memory_format=torch.contiguous_format) if name.startswith(_BUFFERS) else tensor.contiguous()
