"""NaN among parameters and optimizer state, where they lie: of a device one answer comes to the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from resilient_train.frameworks.torch.checkpoint_pieces import names_of
from resilient_train.frameworks.torch.leaves import TENSORS, local
from resilient_train.state.nan import NanFound
from resilient_train.state.tree import flatten

_SUMMED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


def nan_in(tree: Mapping[str, Any]) -> NanFound | None:
    """A sum is NaN if one of its terms is, whatever the order: memory is read once, and nothing is written but sums.

    Of infinities with both signs it is NaN too, so where it is, all terms are looked at.
    """
    tensors = flatten(tree, TENSORS)[1]
    held = [(name, local(tensor)) for name, tensor in zip(names_of(tensors), tensors.values(), strict=True)]
    summed = [(name, tensor) for name, tensor in held if _is_plain(tensor)]
    by_device: dict[torch.device, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    for name, tensor in summed:
        by_device.setdefault(tensor.device, []).append((name, tensor, torch.isnan(tensor.sum())))
    spoilt = [
        name
        for there in by_device.values()
        for (name, tensor, _), may in zip(there, torch.stack([each[2] for each in there]).tolist(), strict=True)
        if may and bool(torch.isnan(tensor).any())
    ]
    return NanFound(len(spoilt), len(held), spoilt[0]) if spoilt else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch can add its elements up. What is quantised, or sparse, or of a class of its own, is left out."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.dtype in _SUMMED
