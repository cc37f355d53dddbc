"""The norm of the gradients, where the loop computes it: in ``torch.nn.utils.clip_grad_norm_``.

That function hands its norm to another one of its module, under whatever name the loop has imported it; so the other
one is replaced. Nothing is computed twice, and nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

from resilient_train.errors import UsageError


class Norms:
    """Watches from its making to ``close``. ``tell`` is given the norm of each clipping of the models' gradients."""

    def __init__(self, models: Sequence[torch.nn.Module], tell: Callable[[torch.Tensor], None]) -> None:
        registered = {id(parameter) for model in models for parameter in model.parameters()}
        self._clip = clip = clip_grad._clip_grads_with_norm_

        def clip_and_tell(parameters: Any, max_norm: float, total_norm: torch.Tensor, *more: Any, **named: Any) -> None:
            clip(parameters, max_norm, total_norm, *more, **named)
            if any(id(parameter) in registered for parameter in parameters):
                tell(kept(total_norm))

        clip_grad._clip_grads_with_norm_ = self._clip_and_tell = clip_and_tell

    def close(self) -> None:
        """Idempotent. Whoever has replaced it since keeps what he has made of it."""
        if clip_grad._clip_grads_with_norm_ is self._clip_and_tell:
            clip_grad._clip_grads_with_norm_ = self._clip


def kept(value: Any) -> Any:
    """One number, as it is now; a tensor's is copied on its device. Raises UsageError if it is none."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UsageError(
                f"session.check() takes one real number, not a tensor of shape {tuple(value.shape)} ({value.dtype}): "
                "give it the mean"
            )
        return value.detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"session.check() takes one real number, not {type(value).__qualname__}") from None
