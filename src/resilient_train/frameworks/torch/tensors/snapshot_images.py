"""The replicated state of a rank as snapshots and checkpoints hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from resilient_train._native import Copier
from resilient_train.frameworks.roles import Image, SaveShare
from resilient_train.frameworks.torch.tensors.checkpoint_pieces import contents, memory_of, piece_of, skipped_bytes
from resilient_train.frameworks.torch.tensors.leaves import is_plainly_dense, is_sharded, local, version_of
from resilient_train.frameworks.torch.tensors.staging import Staging, TensorPart, on_host
from resilient_train.state.capture import Capture, HostCapture
from resilient_train.state.image import ImagePlan, plan_image
from resilient_train.state.sharding import Piece, divide

_Begin = Callable[[memoryview, Copier], Capture]
_Place = tuple[int, int, int]
"""Address, bytes, offset in the image."""
_BUFFERS = "buffers."
"""How the names of buffers begin: a forward pass writes them, so they are copied at once."""


class Called(NamedTuple):
    """A tensor in what is saved. ``here``: by this rank; else by another one, from whom this one gets it as well."""

    name: str
    here: bool = True


_Called = Callable[[str, torch.Tensor], Called]


class _Layout(NamedTuple):
    """Where all is copied from and to. It holds as long as the tensors look the same."""

    looks: list[tuple[Any, ...]]
    share: SaveShare
    plan: ImagePlan
    places: list[_Place]
    """Of the tensors that are copied where they lie, by offset; of the others something, at ..."""
    others: list[tuple[int, Piece]]
    """... these indices."""


class Images:
    """Describes the state for a copy. ``staging``: the way from an accelerator."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._plan: tuple[SaveShare, list[Piece], ImagePlan] | None = None
        self.plans = 0
        """So many times the state's layout was another one than before."""
        self._layout: _Layout | None = None

    def image(
        self,
        tree: Any,
        step: int,
        share: SaveShare,
        changed: str = "",
        *,
        called: _Called | None = None,
    ) -> Image:
        """See ``frameworks/roles.State``; ``tree`` is the state. ``changed``: what is not any more as it is to be.

        ``called``: how each tensor is saved, where there are several replica groups.
        """
        held = contents(tree)
        tensors = held.tensors
        names = tuple(tensors)
        if called is not None:
            saved = [(called(name, tensor), tensor) for name, tensor in tensors.items()]
            names = tuple(each.name for each, _ in saved)
            tensors = {each.name: tensor for each, tensor in saved if each.here}
        if all(on_host(local(tensor)) for tensor in tensors.values()):
            layout = self._laid_out(share, tensors)
            plan = layout.plan
            begin = self._on_host(layout, plan.header(step), tensors)
        else:
            plan = self._planned(share, tensors)
            begin = self._on_device(plan, plan.header(step), tensors)
        spoilt = partial(_changed, _versions(tensors), changed)
        return Image(plan.total_bytes, begin, held.payload, names, spoilt)

    def _on_host(self, layout: _Layout, header: bytes, tensors: Mapping[str, torch.Tensor]) -> _Begin:
        first = np.frombuffer(bytearray(header), dtype=np.uint8)
        places, copies = list(layout.places), []
        for index, piece in layout.others:
            copies.append(_still(piece.name, tensors[piece.name]))
            span = memory_of(piece, copies[-1])
            places[index] = (span.address, span.size, places[index][2])
        return partial(HostCapture, [(first.ctypes.data, first.nbytes, 0), *places], (first, tensors, copies))

    def _on_device(self, plan: ImagePlan, header: bytes, tensors: Mapping[str, torch.Tensor]) -> _Begin:
        first = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        parts = [TensorPart(first, 0, len(first))]
        for piece, _ in plan.places:
            tensor = _still(piece.name, tensors[piece.name])
            parts.append(TensorPart(local(tensor), skipped_bytes(piece, tensor), piece.size_bytes))
        return partial(self._staging.capture, parts)

    def _laid_out(self, share: SaveShare, tensors: Mapping[str, torch.Tensor]) -> _Layout:
        """Most of what a snapshot asks of each tensor is the same each time, and this is time of the training."""
        looks = [(name, *_look(tensor)) for name, tensor in tensors.items()]
        known = self._layout
        if known is not None and (known.looks, known.share) == (looks, share):
            return known
        plan = self._planned(share, tensors)
        places: list[_Place] = []
        others: list[tuple[int, Piece]] = []
        for piece, start in plan.places:
            tensor = tensors[piece.name]
            if not piece.size_bytes:
                continue
            if _is_still(piece.name, tensor):
                places.append((*memory_of(piece, tensor), start))
            else:
                others.append((len(places), piece))
                places.append((0, 0, start))
        self._layout = _Layout(looks, share, plan, places, others)
        return self._layout

    def _planned(self, share: SaveShare, tensors: Mapping[str, torch.Tensor]) -> ImagePlan:
        pieces = divide([piece_of(name, tensor) for name, tensor in tensors.items()], share.parts)[share.part]
        if self._plan is None or self._plan[:2] != (share, pieces):
            self.plans += 1
            self._plan = share, pieces, plan_image(pieces, share.shard, share.shards)
        return self._plan[2]


def _versions(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, int]]:
    """Torch counts how often a tensor was written in place. A buffer is copied at once, and may be written."""
    return [
        (name, tensor, version_of(tensor))
        for name, tensor in tensors.items()
        if not name.startswith(_BUFFERS) and not tensor.is_inference()
    ]


def _changed(before: list[tuple[str, torch.Tensor, int]], already: str) -> str:
    return already or next((name for name, tensor, version in before if version_of(tensor) != version), "")


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What decides where a tensor's bytes lie. Another one that looks the same is copied the same."""
    if is_sharded(tensor):
        held = local(tensor)
        return tensor.dtype, tensor.shape, tensor.placements, held.data_ptr(), is_plainly_dense(held)
    return tensor.dtype, tensor.shape, tensor.data_ptr(), is_plainly_dense(tensor)


def _is_still(name: str, tensor: torch.Tensor) -> bool:
    """Whether it can be copied where it lies until the next update."""
    return is_plainly_dense(local(tensor)) and not name.startswith(_BUFFERS)


def _still(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where ``_is_still``, else a copy of it in one piece."""
    tensor = tensor.detach().resolve_neg()  # a clone resolves a conjugate
    return tensor if _is_still(name, tensor) else tensor.clone(memory_format=torch.contiguous_format)
