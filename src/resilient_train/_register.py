"""Makes the backend ``resilient`` known to torch.distributed, now or when torch is imported, and never imports torch.

Under our agent, ``init_process_group()`` without a backend, or with gloo, makes a resilient group as well: a script
needs no other change than the import (``RESILIENT_WRAP_BACKEND=0`` switches that off).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from resilient_train import config, waiting

_TARGET = "torch.distributed"
_BACKEND = "resilient"
_RANK_PLACE = 4
"""Of the parameters of ``init_process_group`` behind its first, ``rank`` is this one."""


def register_when_imported() -> None:
    """Registers at once if torch.distributed is imported already, else right after it will be."""
    module = sys.modules.get(_TARGET)
    if module is not None and hasattr(module, "Backend"):
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(distributed: Any) -> None:
    if not distributed.is_available() or _BACKEND.upper() in distributed.Backend._plugins:  # noqa: SLF001 - torch has no public list that is right here
        return

    def create(options: Any, backend_options: Any) -> Any:
        from resilient_train.frameworks.torch.group import create as create_group

        return create_group(options, backend_options)

    distributed.Backend.register_backend(_BACKEND, create, extended_api=True, devices=["cpu"])
    wrap_if_linked()


def wrap_if_linked() -> None:
    """Does so where an agent of ours has started this process: what torch's import does, and a fork makes up for."""
    if config.read_link() is not None:
        _wrap(gloo=_wraps_gloo())


def wrap_for_standby() -> None:
    """Likewise in a process that has no agent's orders yet, and waits for them where the script makes its group."""
    _wrap(gloo=_wraps_gloo())


def _wraps_gloo() -> bool:
    settings = config.read_settings()
    return settings.wrap_backend and not config.why_off(settings, config.read_switches())


def _wrap(*, gloo: bool) -> None:
    if not gloo and waiting.stage is None:
        return
    distributed: Any = sys.modules[_TARGET]
    original = distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        chosen = _BACKEND if gloo and (backend is None or backend == "gloo") else backend
        build = functools.partial(original, chosen, *args, **kwargs)
        if waiting.stage is None:
            return build()
        given = len(args) >= _RANK_PLACE or kwargs.get("rank", -1) != -1
        return waiting.stage.at_group(build, late=chosen == _BACKEND and not given)

    distributed.init_process_group = init_process_group
    distributed.distributed_c10d.init_process_group = init_process_group


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for torch.distributed, steps aside, and registers when its module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """The real loader, and a registration after it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._real.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
