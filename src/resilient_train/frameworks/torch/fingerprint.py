"""The digest of what replicas have in common: parameters and optimizer state, in few or many tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from resilient_train._native import Copier
from resilient_train.frameworks.torch.checkpoint import names_of
from resilient_train.frameworks.torch.leaves import TENSORS, dense, span_of
from resilient_train.state.capture import COPY_TIMEOUT_MS
from resilient_train.state.transfer import digest
from resilient_train.state.tree import flatten


class Fingerprint:
    """See ``frameworks/roles.Fingerprint``. ``copier`` is its own until ``digest`` was asked for. ``after``: memory is
    read when this one's copy is over.
    """

    def __init__(self, tree: Mapping[str, Any], copier: Copier, after: Copier | None = None) -> None:
        self._payload, tensors = flatten(tree, TENSORS)
        kept = [dense(tensor) for tensor in tensors.values()]
        pieces, offset = [], 0
        for address, size in map(span_of, kept):
            if size:
                pieces.append((address, size, offset))
                offset += size
        self._copier: Copier | None = copier
        self._digest = ""
        copier.hash(pieces, owner=kept, after=after)

    def digest(self) -> str:
        """Returns when all memory is read."""
        if self._copier is not None:
            while not self._copier.wait(COPY_TIMEOUT_MS):
                pass  # memory is read in milliseconds; on a machine that is slower there is nothing better to do
            self._digest = xxhash.xxh3_128_hexdigest(self._payload + self._copier.digests())
            self._copier = None
        return self._digest


def rows_of(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, digest) of each tensor and of each other value, in order: where two trees begin to differ."""
    leaves = dict(_leaves(tree, ()))
    return [(name, _digest_of(value)) for name, value in zip(names_of(leaves), leaves.values(), strict=True)]


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _digest_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return xxhash.xxh3_64_hexdigest(flatten(value, TENSORS)[0])
    return tensor_digest(value)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Of its elements, dtype and shape; of a DTensor: of what this rank holds of it."""
    if tensor.layout is torch.sparse_coo:
        return f"{tensor_digest(tensor._indices())} {tensor_digest(tensor._values())}"
    held = dense(tensor)  # as long as it is read: it may be a copy
    return digest(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), [span_of(held)])
