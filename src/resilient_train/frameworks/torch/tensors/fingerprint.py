"""The digest of what replicas have in common: parameters and optimizer state, in few or many tensors.

Each tensor is read where it lies. So replicas on devices of different kinds have different digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from resilient_train._native import Copier
from resilient_train.frameworks.torch.tensors.checkpoint_pieces import names_of
from resilient_train.frameworks.torch.tensors.device_digest import device_digest
from resilient_train.frameworks.torch.tensors.leaves import BITS, dense, local, span_of
from resilient_train.state.capture import COPY_TIMEOUT_MS
from resilient_train.state.transfer import digest
from resilient_train.state.tree import flatten, leaves_of


class TorchFingerprint:
    """See ``frameworks/roles.Fingerprint``. ``copier`` is its own until ``digest`` was asked for. ``after``: memory of
    the host is read when this one's copy is over.
    """

    def __init__(self, tree: Mapping[str, Any], copier: Copier, after: Copier | None = None) -> None:
        self._payload, tensors = flatten(tree, BITS)
        self._there = [device_digest(local(tensor)) for tensor in tensors.values() if _on_device(tensor)]
        kept = [dense(tensor) for tensor in tensors.values() if not _on_device(tensor)]
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
            there = b"".join(each.cpu().numpy().tobytes() for each in _together(self._there))
            self._digest = xxhash.xxh3_128_hexdigest(self._payload + self._copier.digests() + there)
            self._copier, self._there = None, []
        return self._digest


def _on_device(tensor: torch.Tensor) -> bool:
    """Whether the digest is made where it lies. Other devices than CUDA's may lack what that takes (whole numbers of 64
    bits), so their memory comes to the host.
    """
    return tensor.is_cuda


def _together(digests: list[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor for each device: one way to the host."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in digests:
        by_device.setdefault(each.device, []).append(each)
    return [torch.stack(each) for each in by_device.values()]


def rows_of(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, digest) of each tensor and of each other value, in order: where two trees begin to differ."""
    leaves = dict(leaves_of(tree))
    return [(name, _digest_of(value)) for name, value in zip(names_of(leaves), leaves.values(), strict=True)]


def _digest_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return xxhash.xxh3_64_hexdigest(flatten(value, BITS)[0])
    return tensor_digest(value)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Of its elements, dtype and shape; of a DTensor: of what this rank holds of it."""
    if tensor.layout is torch.sparse_coo:
        return f"{tensor_digest(tensor._indices())} {tensor_digest(tensor._values())}"
    if _on_device(tensor):
        of = f"{tensor.dtype} {tuple(tensor.shape)} {device_digest(local(tensor)).item():x}"
        return xxhash.xxh3_128_hexdigest(of.encode())
    held = dense(tensor)  # as long as it is read: it may be a copy
    return digest(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), [span_of(held)])
