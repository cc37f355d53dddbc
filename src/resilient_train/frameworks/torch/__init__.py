"""The engine for models of torch: an entry point of ``resilient_train.engines``, which see ``frameworks/roles.Plugin``.

Importing this package does not import torch, which is an extra: only a process that holds a torch model has any
business with it.
"""

from __future__ import annotations

from resilient_train.frameworks.roles import Engine, Objects


def claims(objects: Objects) -> bool:
    """Whether one of the models is a module of torch's."""
    return any(base.__module__.partition(".")[0] == "torch" for model in objects.models for base in type(model).__mro__)


def engine_for(objects: Objects) -> Engine:
    """See ``frameworks/roles.Plugin``."""
    from resilient_train.frameworks.torch import engine

    return engine.engine_for(objects)
