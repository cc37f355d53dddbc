"""What the loop computes of its gradients and its loss, for the anomaly check: see ``frameworks/roles.Gradients``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xxhash

from resilient_train.errors import UsageError
from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.checks import admission
from resilient_train.frameworks.torch.communication.buckets import wrappers_in
from resilient_train.frameworks.torch.sharding.sharded import is_fsdp
from resilient_train.frameworks.torch.tensors.fingerprint import tensor_digest
from resilient_train.frameworks.torch.tensors.leaves import gradients_of, is_sharded
from resilient_train.frameworks.torch.watching.clipping import around_clipping


class TorchGradients:
    """Of the registered models."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._end_watching: Callable[[], None] | None = None
        self._dropping = False
        """The update that is under way is one without gradients."""

    def watch(self, tell: Callable[[Any], None]) -> None:
        registered = {id(parameter) for model in self._objects.models for parameter in model.parameters()}

        def clip_and_tell(clip: Any, given: Any, max_norm: float, total_norm: Any, *more: Any, **named: Any) -> None:
            ours = any(id(parameter) in registered for parameter in given)
            norm = _whole(total_norm) if ours else total_norm
            clip(given, max_norm, norm, *more, **named)
            if ours:
                tell(self.kept(norm))

        self._end_watching = around_clipping(clip_and_tell)

    def close(self) -> None:
        if self._end_watching is not None:
            self._end_watching()

    def begin(self) -> None:
        self._dropping = False

    def without_optimizer(self) -> list[str]:
        return admission.without_optimizer(self._objects)

    def averages(self) -> bool:
        models = admission.trained_of(self._objects.models)
        trained = (model for model in models if any(p.requires_grad for p in model.parameters()))
        return all(wrappers_in((model,)) or any(map(is_fsdp, model.modules())) for model in trained)

    def digest(self) -> str:
        rows = [f"{name} {tensor_digest(gradient)}" for name, gradient in gradients_of(self._objects.models)]
        return xxhash.xxh3_128_hexdigest("\n".join(rows).encode())

    def drop(self) -> None:
        self._dropping = True
        for optimizer in self._objects.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def behind_closure(self) -> None:
        """A closure of the user's has run in an optimizer's ``step()``, and may have computed some anew."""
        if self._dropping:
            self.drop()

    def norm(self) -> Any:
        gradients = [gradient for _, gradient in gradients_of(self._objects.models)]
        if not gradients:
            raise UsageError("session.check(norm=True): there are no gradients yet; call it behind backward()")
        return torch.nn.utils.get_total_norm(gradients)

    def kept(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_complex():
                raise UsageError(
                    f"session.check() takes one real number, not a tensor of shape {tuple(value.shape)} "
                    f"({value.dtype}): give it the mean"
                )
            # Of a sharded model each rank may have the norm of its part alone (``session.check(norm=)``). This is in
            # the body, where a collective is repaired; to read the value in front of the update would be one as well.
            return (value.full_tensor() if is_sharded(value) else value).detach().clone()
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UsageError(f"session.check() takes one real number, not {type(value).__qualname__}") from None

    def scales(self) -> bool:
        scaler = self._objects.scaler
        return scaler is not None and bool(scaler.is_enabled())


def _whole(norm: torch.Tensor) -> Any:
    """Of a sharded model the largest gradient (``norm_type=inf``) comes as that of this rank's part; other norms are
    whole. To clip by it torch makes it whole, by a collective whose result nobody else sees; of one that is whole it
    makes none. So there is one, and both have its value.
    """
    if not is_sharded(norm):
        return norm
    from torch.distributed.tensor import Replicate  # a DTensor is here, so it is imported

    return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)
