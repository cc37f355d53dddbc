"""``TrainingStateMonitor`` of MindSpore Transformers, which records abnormal norms: the class itself, from its file.

The package imports far more than it needs here, so every other module of it is an empty one that has each name that is
asked of it, and where the class asks something of those, it is told what is so in one process without a device.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import mindspore as ms

_PACKAGE = "mindformers"
_FILE = f"{_PACKAGE}/core/callback/callback.py"


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] != _PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]


def monitor_class(folder: Path, rank: int) -> type[ms.Callback]:
    """The class, as rank ``rank`` would have it whose output folder is ``folder``."""
    path = Path(str(importlib.metadata.distribution(_PACKAGE).locate_file(_FILE)))
    spec = importlib.util.spec_from_file_location("training_state_monitor", path)
    assert spec is not None
    assert spec.loader is not None
    finder = _Empty()
    sys.meta_path.insert(0, finder)
    try:
        module: Any = importlib.util.module_from_spec(spec)
        _leave_classes(finder)
        spec.loader.exec_module(module)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
    module.logger = logging.getLogger(_PACKAGE)
    module.get_output_root_path = lambda: str(folder)
    module.get_rank = module.get_real_rank = lambda: rank
    module.get_real_group_size = lambda: 1
    module.get_tensorboard_writer = lambda: None
    return module.TrainingStateMonitor


def _leave_classes(finder: _Empty) -> None:
    """What registers a class gives it back."""
    register: Any = importlib.import_module(f"{_PACKAGE}.tools.register")
    register.MindFormerRegister = MagicMock()
    register.MindFormerRegister.register = lambda *_, **__: lambda found: found


def with_norms(folder: Path, rank: int, threshold: float, norms: Sequence[float]) -> ms.Callback:
    """One whose steps have these global norms, one after the other; 32 bits each, as a network has them."""
    given = iter(norms)

    class Monitor(monitor_class(folder, rank)):  # type: ignore[misc]
        def _get_loss_output(self, outputs: Any) -> tuple[Any, Any, Any]:
            loss, _, local = super()._get_loss_output(outputs)
            return loss, ms.Tensor(next(given), ms.float32).asnumpy(), local

    return Monitor(1, {"check_for_global_norm": True, "global_norm_spike_threshold": threshold})
