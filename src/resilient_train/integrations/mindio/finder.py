"""Gives ``import mindio_ttp`` a provider where MindIO itself is not installed: the last finder that Python asks."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAME = "mindio_ttp"
_HERE = __package__
_EMPTY = (f"{_NAME}.mindspore_api",)
_PACKAGE = f"{_NAME}.framework_ttp"
_FULL = (_PACKAGE, f"{_PACKAGE}.ttp_decorator", f"{_NAME}.controller_ttp", f"{_NAME}.utils")


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the interface's
        target: ModuleType | None = None,  # noqa: ARG002 - likewise
    ) -> ModuleSpec | None:
        if fullname == _NAME:
            return ModuleSpec(fullname, self, is_package=True)
        # Not into MindIO's own package, which may be an older one without some of these modules.
        ours = getattr(sys.modules.get(_NAME), "__loader__", None) is self
        if not ours or fullname not in (*_EMPTY, *_FULL):
            return None
        return ModuleSpec(fullname, self, is_package=fullname == _PACKAGE)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002 - likewise
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _NAME:
            # In the folder that C code looks into for libraries, others are named as these modules are: Python would
            # take them for packages. So the modules are there before the folder is named.
            for name in (*_EMPTY, *_FULL):
                importlib.import_module(name)
            module.__path__.append(str(importlib.import_module(f"{_HERE}.c_api").directory()))
        elif module.__name__ in _FULL:
            given = importlib.import_module(f"{_HERE}.provided")
            module.__dict__.update({n: v for n, v in vars(given).items() if n.startswith("tft_") or n in given.__all__})


def of_mindio() -> str:
    """Where MindIO's own ``mindio_ttp`` is installed; empty: nowhere."""
    found = importlib.machinery.PathFinder.find_spec("mindio_ttp")
    return "" if found is None else str(found.origin or next(iter(found.submodule_search_locations or ()), ""))


def install() -> None:
    """From here on ``import mindio_ttp`` finds ours, unless MindIO's is there."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.append(_Finder())
