"""Gradients that are there when a window begins, and reach an update: nothing could bring them back.

A step that is redone begins with gradients of zeros, and so does a new process (``kept_state.py``): nearly always the
script drops first what is there. Where it does not (it never zeroes them, or one of its optimizers steps each fourth
time only), a fault would change the result. So it is looked for, and refused.

That a pass has added to one says nothing yet: the generator's loss of a GAN goes back through the discriminator, whose
gradients are dropped before they are used. It must reach an optimizer's ``step()``, or the norm by which gradients are
clipped.

Not seen: sparse gradients; one that the script changes by its own hand; and what it reads of one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from resilient_train.errors import UsageError
from resilient_train.frameworks.torch.sharding.sharded import withholds
from resilient_train.frameworks.torch.tensors.leaves import is_sharded, local, version_of
from resilient_train.frameworks.torch.watching.clipping import around_clipping
from resilient_train.frameworks.torch.watching.fsdp_sums import before_sums, is_used


class _Gradient(NamedTuple):
    """As a window began."""

    parameter: torch.Tensor
    tensor: weakref.ref[torch.Tensor]
    version: int

    def is_written(self) -> bool:
        """Since then, or gone."""
        tensor = self.tensor()
        return tensor is None or version_of(tensor) != self.version

    def is_there(self) -> bool:
        """Still."""
        gradient = self.parameter.grad
        return gradient is not None and gradient is self.tensor()


class CarriedGradients:
    """Looked for in the windows 0, 1, 2, 4, 8, ..., and the ones behind these (what happens in each other one): the
    script is the same in all. That takes hooks, in a window that begins with gradients (a loop that zeroes them last
    has none).
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._windows = 0
        self._hooks: list[Callable[[], None]] = []
        """What takes them away."""
        self._nodes: list[Any] = []
        """Autograd forgets them, and their hooks, as soon as nobody has them."""
        self._there: dict[int, _Gradient] = {}
        """What a window has begun with, of parameters that no pass and no update has come to since; by their ids."""
        self._carried: set[int] = set()
        """Parameters with a gradient that was added to, in this window or an earlier one; by their ids."""
        self._withheld = False
        """By FSDP, as the window began: ``zero_grad()`` does not drop them, so they reach an update."""

    def begin(self) -> None:
        """A window begins."""
        self._there = {me: each for me, each in self._there.items() if each.is_there()}
        if self._hooks and not self._carried and not self._there:
            self.close()
        number, before = self._windows, self._windows - 1
        if not number & before or not before & (before - 1):
            self._look()
        self._windows += 1

    def _look(self) -> None:
        self.close()
        self._withheld = withholds(self._models)
        for model in self._models:
            for parameter in model.parameters():
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                self._there[id(parameter)] = _Gradient(parameter, weakref.ref(gradient), version_of(gradient))
                self._nodes.append(node := _node(parameter))
                self._hooks.append(node.register_prehook(self._before(parameter)).remove)
        if self._hooks:
            self._hooks.append(around_clipping(self._check_and_clip))
        if is_used() and any(is_sharded(each.parameter) for each in self._there.values()):
            self._hooks.append(before_sums(self._add))

    def _check_and_clip(self, clip: Any, given: list[torch.Tensor], *more: Any, **named: Any) -> None:
        self._check(given, "clip_grad_norm_ takes the norm of")
        clip(given, *more, **named)

    def _before(self, parameter: torch.nn.Parameter) -> Any:
        def before(_: Any) -> None:
            self._add(parameter)

        return before

    def _add(self, parameter: torch.Tensor) -> None:
        """A pass has a gradient to add to the one that is there."""
        me = id(parameter)
        there, added = self._there.pop(me, None), me in self._carried
        self._carried.discard(me)
        # In the first window DDP may have laid out its buckets anew, and gradients that are views of them.
        same = there is not None and (self._windows == 1 or there.is_there())
        if (added or same) and _is_something(parameter.grad):
            self._carried.add(me)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to write. Raises UsageError."""
        if self._withheld:
            raise UsageError(
                f"FSDP has gradients from {self._since} that it has not communicated (set_requires_gradient_sync(False)"
                "), and adds them to those of the next pass that does: a step that is redone begins without them. "
                "Communicate the last pass in front of each update (docs/how-to/loops.md)"
            )
        if self._carried or self._there:
            parameters = (each for group in optimizer.param_groups for each in group["params"])
            self._check(parameters, f"{type(optimizer).__qualname__} is about to update")

    def _check(self, parameters: Iterable[torch.Tensor], what: str) -> None:
        for parameter in parameters:
            if self._is_carried(parameter):
                raise UsageError(
                    f"{what} {self._name(parameter)}, and there is something from {self._since} in its gradient: a "
                    "step that is redone begins without that. Zero gradients behind each update or in front of the "
                    "backward pass; optimizers that accumulate must step together (docs/how-to/loops.md)"
                )

    @property
    def _since(self) -> str:
        return "before the loop" if self._windows == 1 else "an update before"

    def _is_carried(self, parameter: torch.Tensor) -> bool:
        there, added = self._there.pop(id(parameter), None), id(parameter) in self._carried
        self._carried.discard(id(parameter))
        # What was added to may be in another tensor by now; a script that drops it does so in front of a pass. Where no
        # pass has come, it is what was there if nobody has written it.
        if not added and (there is None or not there.is_there() or there.is_written()):
            return False
        return _is_something(parameter.grad)

    def _name(self, parameter: torch.Tensor) -> str:
        named = (pair for model in self._models for pair in model.named_parameters())
        return next((repr(name) for name, each in named if each is parameter), "a parameter")

    def forget(self) -> None:
        """The window is taken back."""
        self._withheld = False
        self._there.clear()
        self._carried.clear()

    def close(self) -> None:
        """Takes the hooks away. Idempotent."""
        self.forget()
        for remove in self._hooks:
            remove()
        self._hooks.clear()
        self._nodes.clear()


def _node(parameter: torch.nn.Parameter) -> Any:
    """Where autograd adds its gradient up; of one that is frozen for now, when it is trained again."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    node = get_gradient_edge(parameter).node
    if frozen:
        parameter.requires_grad_(False)
    return node


def _is_something(gradient: torch.Tensor | None) -> bool:
    with torch.no_grad():
        return gradient is not None and bool(local(gradient).any())
