"""Device memory that lost data (UCE): which tensors owned it, and what that costs.

The device reports address ranges. A range may hit replicated state (fetched again from a replica, those tensors only,
into new memory), what is this rank's own (taken from its publication), or nothing that outlives the step: gradients,
activations, free memory (the step is redone).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch

from resilient_train.frameworks.roles import Damage
from resilient_train.frameworks.torch.tensors.leaves import is_plainly_dense, is_sharded, local, span_of
from resilient_train.state.transfer import Span
from resilient_train.state.tree import Path

_POISON = 0xFF
"""Not a number in every floating-point format, and an absurd integer: a repair that does nothing can't go unseen."""


def extent(tensor: torch.Tensor) -> Span:
    """The memory in which the tensor's elements lie."""
    tensor = local(tensor)
    if is_plainly_dense(tensor):
        return span_of(tensor)
    storage = tensor.untyped_storage()
    return Span(storage.data_ptr(), storage.nbytes())


def assess(ranges: Iterable[Span], replicated: Mapping[Path, torch.Tensor], own: Mapping[str, torch.Tensor]) -> Damage:
    """Finds the owners. A tensor of both kinds (a buffer that has become the rank's own) counts as the rank's own."""
    own_extents = {name: extent(tensor) for name, tensor in own.items()}
    mine = set(own_extents.values())
    paths: set[Path] = set()
    names: set[str] = set()
    elsewhere = 0
    for hit in ranges:
        hit_paths = {path for path, tensor in replicated.items() if (e := extent(tensor)) not in mine and _meet(e, hit)}
        hit_names = {name for name, each in own_extents.items() if _meet(each, hit)}
        elsewhere += not hit_paths and not hit_names
        paths |= hit_paths
        names |= hit_names
    return Damage(frozenset(paths), tuple(sorted(names)), elsewhere)


def move(tensor: torch.Tensor) -> None:
    """Gives the tensor new memory, of any content; whoever holds the tensor (DDP, an optimizer) sees the new one. Of a
    DTensor: this rank's part (not of a parameter of ``fully_shard``'s: see ``Sharding.move``).
    """
    held = tensor._local_tensor if is_sharded(tensor) else tensor
    held.data = torch.zeros_like(held.data)


def _meet(one: Span, other: Span) -> bool:
    return one.address < other.address + other.size and other.address < one.address + one.size


class InjectedErrors:
    """Stands for the device's own list of damaged ranges where there is no such device: filled by fault injection."""

    def __init__(self) -> None:
        self._ranges: list[Span] = []
        self._kept: list[torch.Tensor] = []

    def poison(self, tensor: torch.Tensor) -> None:
        """Overwrites the middle half of the tensor, and reports that range from now on."""
        whole = extent(tensor)
        quarter = whole.size // 4
        hit = Span(whole.address + quarter, max(1, whole.size - 2 * quarter))
        if tensor.is_cpu:
            ctypes.memset(hit.address, _POISON, hit.size)
        else:
            storage = local(tensor).untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            memory.set_(storage, hit.address - storage.data_ptr(), (hit.size,), (1,)).fill_(_POISON)
        self._ranges.append(hit)
        self._kept.append(tensor)

    def take(self) -> list[Span]:
        """The ranges reported since the last call."""
        taken, self._ranges = self._ranges, []
        self._kept.clear()
        return taken
