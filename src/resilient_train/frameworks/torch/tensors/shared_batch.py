"""A batch that a process of another rank is to compute from as well: as bytes, if it is the very same thing there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from resilient_train.errors import StateError
from resilient_train.frameworks.torch.tensors.leaves import PLAIN, pack


def share(batch: Any) -> bytes:
    """For ``leaves.unpack``. Raises StateError for what would come out as something else: a class of the user's, a
    tensor on a device, one whose elements lie in another order (sums depend on that), or two in the same memory (what a
    body writes into one is in the other).
    """
    _check(batch, set())
    return pack(batch)


def _check(value: Any, places: set[int]) -> None:
    """``places``: where the memory lies that was met before."""
    kind = type(value)
    if kind is torch.Tensor:
        here = value.is_cpu and value.layout is torch.strided and not value.is_nested
        if not here or not value.is_contiguous() or value.requires_grad or value.is_inference():
            raise StateError(f"a tensor on {value.device} that is not laid out plainly, or wants a gradient")
        _check_place(value.data_ptr() if value.numel() else 0, places)
    elif kind in (list, tuple):
        for item in value:
            _check(item, places)
    elif kind is dict:
        for key, item in value.items():
            _check(key, places)
            _check(item, places)
    elif kind is np.ndarray:
        if value.dtype.hasobject or not value.flags.c_contiguous:
            raise StateError("an array of objects, or one that is not laid out plainly")
        _check_place(value.ctypes.data if value.size else 0, places)
    elif kind not in PLAIN and not issubclass(kind, np.generic):
        raise StateError(f"it has a {kind.__qualname__}")


def _check_place(address: int, places: set[int]) -> None:
    if address in places:
        raise StateError("two of its tensors lie in the same memory")
    if address:
        places.add(address)
