"""What a rank has that no replica does: its random numbers, its unsynchronised buffers, what the user calls its own.

All of it is published before the commit point of each update, so it is kept small: a buffer counts only from the moment
that it changes for the first time (masks and tables never do; a replica's or the constructor's are as good).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from resilient_train.frameworks.torch.replicated import copy_tree, restore_object, state_of

# Their kernels write the running statistics without telling the version counter.
_SILENT_WRITERS = (torch.nn.modules.batchnorm._NormBase,)


class Buffers:
    """The models' buffers that have changed since the start; ``changed`` finds new ones by version and address."""

    def __init__(self, models: tuple[torch.nn.Module, ...]) -> None:
        self._models = models
        self._live: set[str] = set()
        self._quiet: dict[str, tuple[torch.nn.Module, str, int, int]] = {}
        self._first: dict[str, torch.Tensor] = {}
        for index, model in enumerate(models):
            for prefix, module in model.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    key = f"{index}.{prefix}.{name}"
                    self._quiet[key] = (module, name, buffer._version, buffer.data_ptr())
                    if isinstance(module, _SILENT_WRITERS):
                        self._live.add(key)
                    else:
                        self._first[key] = buffer.detach().clone()
        self._all = {key: (module, name) for key, (module, name, _, _) in self._quiet.items()}
        for key in self._live:
            del self._quiet[key]

    def changed(self) -> dict[str, torch.Tensor]:
        """The buffers that are this rank's own, by key; not copied."""
        for key, (module, name, version, address) in list(self._quiet.items()):
            buffer = module._buffers[name]
            if buffer is not None and (buffer._version != version or buffer.data_ptr() != address):
                self._live.add(key)
                del self._quiet[key]
        return {key: self._present(key) for key in sorted(self._live)} if self._live else {}

    def _present(self, key: str) -> torch.Tensor:
        module, name = self._all[key]
        return cast("torch.Tensor", module._buffers[name])  # None only if the model takes a buffer away while it trains

    def restore(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copies ``values`` into the buffers of those keys, in place: DDP and captured graphs hold on to them."""
        with torch.no_grad():
            for key, value in values.items():
                self._present(key).copy_(value)
                self._live.add(key)
                self._quiet.pop(key, None)

    def rollback(self, values: Mapping[str, torch.Tensor]) -> None:
        """Back to ``values``; a buffer that changed for the first time since then goes back to its first value."""
        news = {key: first for key, first in self._first.items() if key in self.changed() and key not in values}
        self.restore({**values, **news})


class RankState:
    """All of it together, as one tree."""

    def __init__(self, models: tuple[torch.nn.Module, ...], extra: Mapping[str, Any]) -> None:
        self.buffers = Buffers(models)
        self._extra = extra

    def capture(self) -> dict[str, Any]:
        """The present state without the random numbers, empty if there is none; buffers are references, to be packed or
        cloned before they change.
        """
        buffers = self.buffers.changed()
        if not buffers and not self._extra:
            return {}
        return {"buffers": buffers, "extra": self.extra_states()}

    def extra_states(self) -> dict[str, Any]:
        """The states of what the user registered as each rank's own."""
        return {name: state_of(each) for name, each in self._extra.items()}

    def extra_copy(self) -> dict[str, Any]:
        """The same, to be kept."""
        return copy_tree(self.extra_states()) if self._extra else {}

    def restore_extra(self, states: Mapping[str, Any]) -> None:
        """The inverse of ``extra_states``."""
        for name, value in states.items():
            restore_object(self._extra[name], value)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts a captured state back, in this process or in another that built the same model."""
        if state:
            self.buffers.restore(state["buffers"])
            self.restore_extra(state["extra"])
