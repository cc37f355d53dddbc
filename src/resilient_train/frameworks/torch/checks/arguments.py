"""A look at what a body is given: is it the same data in the process that takes a place? Is it what it was?"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from resilient_train.frameworks.torch.kept.batch_copy import NO_DATA, is_data, slots_of
from resilient_train.frameworks.torch.tensors.leaves import PLAIN
from resilient_train.frameworks.torch.watching.reached import attributes_of

_ELEMENTS = 64
"""Of each tensor, evenly spread: another batch has others."""
_PARTS_MAX = 500
"""Of an object: a batch has few, a list of all samples many."""
_DATA = torch.Tensor, np.ndarray, torch.Generator, np.random.Generator, random.Random
_NUMBERS = PLAIN | {complex}
_ARRAYS = {
    *(torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
}
"""NumPy has these too, and reads them in a fifth of the time."""


class _Within:
    """The objects of the user's that something is found in. They may know of much that is not looked at, each time."""

    def __init__(self) -> None:
        self.objects: list[object] = []
        self._left = _PARTS_MAX

    def has_room(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def leads_to(self, inner: object) -> bool:
        """One is looked into once: what it knows in its turn need not be data (its loader), unless it says so. As in
        ``batch_copy.py``.
        """
        known = any(each is inner for each in self.objects)
        leads = not known and (is_data(inner) or all(map(is_data, self.objects)))
        if leads:
            self.objects.append(inner)
        return leads


def look(tree: Any, variables: Iterable[Any] = (), *, plain: bool = True) -> bytes:
    """A digest of a few elements of each tensor and array in nested mappings, lists, tuples and objects of the user's,
    of generators of random numbers, and (``plain``) of numbers and texts; empty without any. What has a
    ``state_dict()`` is no data.

    Of tensors in a device's memory, and of those that are no plain ones, shape and type alone, and (``plain``) how
    often they were written, which is this process's own count: a look into a device's memory would wait for the device.
    Of ``variables``, which may be anything, and also what is registered, which a redo writes, only tensors, arrays and
    generators are looked at, and no such counts.
    """
    data = (part for each in variables if isinstance(each, _DATA) for part in _seen(each, plain=False))
    seen = b"".join((*_seen(tree, plain=plain), *data))
    return xxhash.xxh3_64_digest(seen) if seen else b""


def _seen(tree: Any, *, plain: bool, within: _Within | None = None) -> Iterator[bytes]:
    if within is not None and not within.has_room():
        return
    if isinstance(tree, torch.Tensor):
        if tree.is_nested:
            return
        yield f"{tuple(tree.shape)} {tree.dtype}".encode()
        if tree.is_cpu and tree.layout is torch.strided and type(tree) in {torch.Tensor, torch.nn.Parameter}:
            yield _elements(tree.detach())
        elif plain and not (tree.is_inference() or isinstance(tree, torch.nn.Parameter)):  # a redo writes parameters
            yield repr(tree._version).encode()
    elif isinstance(tree, np.ndarray):
        yield f"{tree.shape} {tree.dtype}".encode()
        if tree.dtype != object:
            yield tree.flat[:: max(1, tree.size // _ELEMENTS)].tobytes()
    elif isinstance(tree, Mapping if within is None else dict):  # another's values may be read from a file
        for value in islice(tree.values(), _PARTS_MAX if within else None):
            yield from _seen(value, plain=plain, within=within)
    elif isinstance(tree, (list, tuple)):
        if tree and type(tree[0]) in _NUMBERS:
            yield repr(tree[:_ELEMENTS]).encode(errors="surrogatepass") if plain else b""
            return
        for value in islice(tree, _PARTS_MAX if within else None):
            yield from _seen(value, plain=plain, within=within)
    elif plain and type(tree) in _NUMBERS:
        yield repr(tree).encode(errors="surrogatepass")
    elif isinstance(tree, torch.Generator) and tree.device.type == "cpu":
        yield tree.get_state().numpy().tobytes()
    elif isinstance(tree, np.random.Generator):
        yield repr(tree.bit_generator.state).encode()
    elif isinstance(tree, random.Random):
        yield repr(tree.getstate()).encode()
    elif not isinstance(tree, NO_DATA) and not hasattr(type(tree), "state_dict"):
        values = [*slots_of(tree).values(), *attributes_of(tree).values()]
        within = within or _Within()
        if values and within.leads_to(tree):
            for value in values:
                yield from _seen(value, plain=plain, within=within)
            within.objects.pop()


def _elements(tensor: torch.Tensor) -> bytes:
    if tensor.dtype in _ARRAYS and not tensor.is_neg():
        return tensor.numpy().flat[:: max(1, tensor.numel() // _ELEMENTS)].tobytes()  # nothing is laid out anew
    spread = tensor.resolve_conj().resolve_neg().reshape(-1)[:: max(1, tensor.numel() // _ELEMENTS)].contiguous()
    return spread.view(torch.uint8).numpy().tobytes()
