"""What modules have besides parameters and buffers, and give by ``get_extra_state()``: the scale of a layer, say.

A forward pass may write it, and each rank's may see other data, so it is treated as a buffer that ranks do not share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have any, by name. As ``nn.Module.state_dict`` does, this asks their classes."""
    for name, module in model.named_modules():
        if publishes(module):
            yield name, module


def publishes(module: nn.Module) -> bool:
    """Whether it has a ``get_extra_state()`` of its own class's."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


class ExtraState:
    """Of the modules that the models have when this is made."""

    def __init__(self, models: tuple[nn.Module, ...]) -> None:
        self._modules = {
            f"{index}.{name}": module for index, model in enumerate(models) for name, module in with_extra_state(model)
        }

    def any(self) -> bool:
        """Whether there are such modules."""
        return bool(self._modules)

    def held(self) -> dict[str, Any]:
        """By module; not copied."""
        return {key: module.get_extra_state() for key, module in self._modules.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """The inverse, of copies, in this process or another."""
        for key, state in states.items():
            self._modules[key].set_extra_state(state)
