"""What a rank has that no replica does: its random numbers, its unsynchronised buffers, what else its modules write in
forward passes (``extra_state.py``), what the user calls its own.

All of it is published before the commit point of each update, so it is kept small: a buffer counts only from the moment
that it changes for the first time (masks and tables never do; a replica's or the constructor's are as good).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from resilient_train._native import Glance
from resilient_train.frameworks.torch.buffers import Buffers
from resilient_train.frameworks.torch.containers import dressed
from resilient_train.frameworks.torch.extra_state import ExtraState
from resilient_train.frameworks.torch.leaves import TENSORS, pack, restore_object, span_of, state_of, unpack
from resilient_train.state.tree import flatten


class RankState:
    """All of it together, as one tree: see ``frameworks/roles.RankState``."""

    def __init__(self, models: tuple[torch.nn.Module, ...], extra: Mapping[str, Any]) -> None:
        self.buffers = Buffers(models)
        self._extra = extra
        self._same: _SameBuffers | None = None
        self._modules = ExtraState(models)
        self._more = bool(extra) or self._modules.any()
        """Whether there is something beside buffers."""

    def packed(self) -> bytes:
        own = self.buffers.own()
        if not own and not self._more:
            return b""
        buffers = {key: buffer for key, buffer in own.items() if buffer is not None}
        only = len(buffers) == len(own) and not self._more
        if only and self._same is not None and self._same.are(buffers):
            return self._same.packed()
        if only and all(map(_lies_here, buffers.values())):
            self._same = _SameBuffers(buffers)
            return self._same.packed()
        extra = {name: state_of(each) for name, each in self._extra.items()}
        modules = {"extra_state": self._modules.held()} if self._modules.any() else {}
        return pack({"buffers": own, "extra": extra, **modules})

    def restore(self, state: bytes) -> None:
        """In another process than that which packed it: one that has built the same model. Raises ProtocolError."""
        if state:
            tree = unpack(state)
            self.buffers.restore(tree["buffers"])
            self._restore_more(tree)

    def adopt(self, state: bytes) -> None:
        if state:
            tree = unpack(state)
            self.buffers.restore(tree["buffers"])
            self._modules.restore(tree.get("extra_state", {}))

    def rollback(self, state: bytes) -> None:
        """Puts the state at the begin of a window back, in the process that has packed it then."""
        tree = unpack(state) if state else {"buffers": {}, "extra": {}}
        self.buffers.rollback(tree["buffers"])
        self._restore_more(tree)

    def entries(self) -> dict[str, bytes]:
        return {name: pack(state_of(each)) for name, each in self._extra.items()}

    def restore_entry(self, name: str, state: bytes) -> None:
        self._restore_extra({name: unpack(state)})

    def _restore_more(self, tree: Mapping[str, Any]) -> None:
        self._modules.restore(tree.get("extra_state", {}))
        self._restore_extra(tree["extra"])

    def _restore_extra(self, states: Mapping[str, Any]) -> None:
        for name, value in states.items():
            thing = self._extra[name]
            restore_object(thing, dressed(value, state_of(thing)))


class _SameBuffers:
    """Packs the same buffers over and over, three times a step: they are described once, and while they stand still,
    which a look at their memory tells, what was packed last is still true. (160 buffers: 40 us instead of 750.)
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._tensors = list(buffers.values())
        self._places = [(each.data_ptr(), each.shape) for each in self._tensors]
        self._description, _ = flatten({"buffers": buffers, "extra": {}}, TENSORS)
        self._glance = Glance([span_of(each) for each in self._tensors])
        self._packed = b""

    def are(self, buffers: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the buffers, where they were."""
        return (
            len(buffers) == len(self._tensors)
            and all(map(operator.is_, buffers.values(), self._tensors))
            and [(each.data_ptr(), each.shape) for each in self._tensors] == self._places
        )

    def packed(self) -> bytes:
        """As ``leaves.pack`` does it."""
        if self._glance.changed():
            self._packed = msgspec.msgpack.encode((self._description, self._glance.seen()))
        return self._packed


def _lies_here(buffer: torch.Tensor) -> bool:
    return buffer.device.type == "cpu" and buffer.is_contiguous() and buffer.numel() > 0
