"""Where torch clips gradients by their norm.

``torch.nn.utils.clip_grad_norm_`` hands the norm to another function of its module, under whatever name the loop has
imported it; so the other one is replaced. Nothing is computed twice, and nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from resilient_train.frameworks.torch.watching.replaced import replace


def around_clipping(call: Callable[..., None]) -> Callable[[], None]:
    """``call(clip, parameters, max_norm, norm, ...)`` is called in the place of ``clip(parameters, ...)``. Returns what
    ends that.
    """
    clip = clip_grad._clip_grads_with_norm_

    def called(parameters: Any, *more: Any, **named: Any) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        call(clip, given, *more, **named)

    return replace(clip_grad, "_clip_grads_with_norm_", called)
