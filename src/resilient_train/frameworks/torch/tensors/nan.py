"""NaN among parameters and optimizer state, where they lie: of a device one answer comes to the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from resilient_train.frameworks.torch.tensors.checkpoint_pieces import names_of
from resilient_train.frameworks.torch.tensors.leaves import local
from resilient_train.state.nan import NanFound
from resilient_train.state.tree import leaves_of

_WITH_NORM = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


def nan_in(tree: Mapping[str, Any]) -> NanFound | None:
    """A norm is NaN if one of its terms is, whatever the order: memory is read once, and nothing is written but norms.
    Many small tensors are one call. Where it is NaN all terms are looked at: of infinities a device may make it one.
    """
    held = {path: local(each) for path, each in leaves_of(tree) if isinstance(each, torch.Tensor)}
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Any, ...]]] = {}
    for path, tensor in held.items():
        if _is_plain(tensor):
            alike.setdefault((tensor.device, tensor.dtype), []).append(path)
    spoilt = {
        path
        for paths in alike.values()
        for path, is_nan in zip(paths, _are_nan([held[path] for path in paths]), strict=True)
        if is_nan and bool(torch.isnan(held[path]).any())
    }
    if not spoilt:
        return None
    first = next(name for path, name in zip(held, names_of(held), strict=True) if path in spoilt)
    return NanFound(len(spoilt), len(held), first)


def _are_nan(tensors: list[torch.Tensor]) -> list[bool]:
    with torch.no_grad():
        found: list[bool] = torch.isnan(torch.stack(torch._foreach_norm(tensors))).tolist()
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch can take a norm of it. What is quantised, or sparse, or of a class of its own, is left out; so is
    what has no element.
    """
    dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return dense and tensor.dtype in _WITH_NORM and tensor.numel() > 0
