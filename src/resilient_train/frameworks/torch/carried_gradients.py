"""Gradients that are there when a window begins, and reach an update: nothing could bring them back.

A step that is redone begins with gradients of zeros, and so does a new process (``kept_state.py``): nearly always the
script drops first what is there. Where it does not (it never zeroes them, or one of its optimizers steps each fourth
time only), a fault would change the result. So it is looked for, and refused.

That a pass has added to one says nothing yet: the generator's loss of a GAN goes back through the discriminator, whose
gradients are dropped before they are used. It must reach an optimizer's ``step()``.

Not seen: what FSDP adds up, which does that by itself, and a gradient that the script changes by its own hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from resilient_train.errors import UsageError
from resilient_train.frameworks.torch.leaves import local, version_of


class _Gradient(NamedTuple):
    """As the window began."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    def is_written(self) -> bool:
        """Since then, or gone."""
        tensor = self.tensor()
        return tensor is None or version_of(tensor) != self.version

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Still, and with something in it."""
        gradient = parameter.grad
        with torch.no_grad():
            return gradient is not None and gradient is self.tensor() and bool(local(gradient).any())


class CarriedGradients:
    """Looked for in the windows 0, 1, 2, 4, 8, ...: the script is the same in all. That takes hooks, in a window that
    begins with gradients (a loop that zeroes them last has none).
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._windows = 0
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []
        """Autograd forgets them, and their hooks, as soon as nobody has them."""
        self._there: dict[int, _Gradient] = {}
        """What the window has begun with, of parameters that no pass has come to yet; by their ids."""
        self._carried: dict[int, _Gradient] = {}
        """What was added to, in this window or an earlier one."""

    def begin(self) -> None:
        """A window begins."""
        self._there.clear()
        if self._hooks and not self._carried:
            self.close()
        if self._windows & (self._windows - 1) == 0:
            self._look()
        self._windows += 1

    def _look(self) -> None:
        self.close()
        for model in self._models:
            for parameter in model.parameters():
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided or not parameter.requires_grad:
                    continue
                self._there[id(parameter)] = _Gradient(weakref.ref(gradient), version_of(gradient))
                self._nodes.append(node := get_gradient_edge(parameter).node)
                self._hooks.append(node.register_prehook(self._before(parameter)))

    def _before(self, parameter: torch.nn.Parameter) -> Any:
        me = id(parameter)

        def add(_: Any) -> None:
            """The pass has a gradient to add to the one that is there."""
            there = self._there.pop(me, self._carried.pop(me, None))
            if there is not None and there.is_of(parameter):
                self._carried[me] = there

        return add

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to write. Raises UsageError."""
        if not self._carried and not self._there:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if self._is_carried(parameter):
                    since = "before the loop" if self._windows == 1 else "an update before"
                    raise UsageError(
                        f"{type(optimizer).__qualname__} is about to update {self._name(parameter)} by a gradient in "
                        f"which there is something from {since}, and a step that is redone begins without that: zero "
                        "the gradients behind each update or in front of the backward pass; optimizers that "
                        "accumulate must step together (docs/how-to/loops.md)"
                    )

    def _is_carried(self, parameter: torch.Tensor) -> bool:
        added, there = self._carried.pop(id(parameter), None), self._there.pop(id(parameter), None)
        if added is not None:
            return added.is_of(parameter)
        # No pass has come to it, or it is FSDP's: what nobody has written is what was there.
        return there is not None and there.is_of(parameter) and not there.is_written()

    def _name(self, parameter: torch.nn.Parameter) -> str:
        named = (pair for model in self._models for pair in model.named_parameters())
        return next((repr(name) for name, each in named if each is parameter), "a parameter")

    def forget(self) -> None:
        """The window is taken back."""
        self._there.clear()
        self._carried.clear()

    def close(self) -> None:
        """Takes the hooks away. Idempotent."""
        self.forget()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()
