"""What optimizers keep beside parameters. Their own updates write it; what a body writes there, nothing puts back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from resilient_train.frameworks.torch.kept.module_entries import same_objects
from resilient_train.frameworks.torch.tensors.leaves import version_of

_FIRST, _EACH = 16, 32
"""The windows that are looked at: 0.2 us for each tensor, of which there are two for each parameter as a rule."""


class OptimizerState(NamedTuple):
    """Its tensors, and which version of each."""

    tensors: list[torch.Tensor]
    versions: list[int]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """As it is now."""
        tensors = [*_tensors_of(optimizer)]
        return cls(tensors, [*map(version_of, tensors)])

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is that still."""
        now = OptimizerState.of(optimizer)
        return same_objects(now.tensors, self.tensors) and now.versions == self.versions


def first_written(optimizers: Sequence[torch.optim.Optimizer], found: Sequence[OptimizerState]) -> str:
    """The name of the first that has other state than was ``found``; empty: none."""
    pairs = enumerate(zip(optimizers, found, strict=True))
    return next((f"optimizer.{index}" for index, (each, was) in pairs if not was.is_of(each)), "")


class WrittenStates:
    """Tells, once, that bodies write them: a momentum that they halve is halved twice in a step that runs again."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._windows = 0
        self._found: list[OptimizerState] = []
        self._told = False

    def begin(self) -> None:
        """A window does."""
        self._windows += 1
        looks = not self._told and (self._windows <= _FIRST or self._windows % _EACH == 0)
        self._found = [*map(OptimizerState.of, self._optimizers)] if looks else []

    def written(self) -> str:
        """The bodies have come to their end: what they have written; empty: nothing that was seen."""
        found, self._found = self._found, []
        name = first_written(self._optimizers, found) if found else ""
        self._told = self._told or bool(name)
        return name


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for entry in optimizer.state.values():
        for each in entry.values() if isinstance(entry, Mapping) else ():
            if isinstance(each, torch.Tensor):
                yield each
