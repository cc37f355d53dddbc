"""Engines: what the Session must be able to ask of a training framework. One sub-package per framework."""

from __future__ import annotations

from typing import Any

from resilient_train.errors import ConfigError
from resilient_train.frameworks.base import Framework, Objects


def engine_for(objects: Objects) -> Framework:
    """The engine for the framework that ``objects.model`` belongs to. Raises ConfigError for a foreign one."""
    for model in objects.models:
        if any(base.__module__.partition(".")[0] == "torch" for base in type(model).__mro__):
            # torch is an extra: only a process that holds a torch model has any business importing its engine.
            from resilient_train.frameworks.torch.engine import TorchEngine

            return TorchEngine(objects)
    raise ConfigError(f"model is a {_qualified(objects.models)}: no engine for it (torch.nn.Module is supported)")


def _qualified(models: tuple[Any, ...]) -> str:
    return ", ".join(f"{type(model).__module__}.{type(model).__qualname__}" for model in models) or "missing"
