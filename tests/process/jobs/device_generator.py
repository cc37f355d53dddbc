"""The random numbers of a device that is not there: dropout draws from a generator of its own. Nothing of ours."""

from __future__ import annotations

import torch

generator = torch.Generator()


def _dropout(inputs: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    assert not inplace
    if not training:
        return inputs
    kept = torch.empty_like(inputs, requires_grad=False).bernoulli_(1 - p, generator=generator)
    return inputs * kept / (1 - p)


def draw_dropout(seed: int) -> None:
    """From now on."""
    generator.manual_seed(seed)
    torch.nn.functional.dropout = _dropout
