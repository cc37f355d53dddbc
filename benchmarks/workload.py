"""The models that the benchmark jobs train. Everything is made from one seed, so that all ranks have the same."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

_WIDTH = 1024
_HIDDEN = {"10m": 9, "21m": 20}
"""Layers of ``_WIDTH`` by ``_WIDTH``."""


class Work(NamedTuple):
    """A model, and the one batch that it is trained on for ever."""

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def make(name: str) -> Work:
    """``tiny``: 10 k parameters, the step is nearly all overhead. ``10m``: 10 M parameters.
    ``21m``: 21.5 M, which is 258 MB of state with AdamW's moments.

    Both have dropout: a step that draws no random numbers would let the Session publish less than a real one does.
    """
    torch.manual_seed(0)
    if name == "tiny":
        layers: list[nn.Module] = [nn.Linear(64, 104), nn.GELU(), nn.Dropout(0.1), nn.Linear(104, 32)]
        return Work(nn.Sequential(*layers), torch.randn(8, 64), torch.randint(32, (8,)))
    layers = [nn.Linear(512, _WIDTH), nn.GELU()]
    for _ in range(_HIDDEN[name]):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1)]
    layers.append(nn.Linear(_WIDTH, 32))
    return Work(nn.Sequential(*layers), torch.randn(16, 512), torch.randint(32, (16,)))


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, work: Work) -> None:
    """One step's body, the same with and without a Session."""
    loss = nn.functional.cross_entropy(model(work.inputs), work.targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
