"""Gives ``import mindio_ttp`` a provider where MindIO itself is not installed: the last finder that Python asks."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PROVIDED = f"{__package__}.provided"
_EMPTY = ("mindio_ttp", "mindio_ttp.mindspore_api")
_FULL = ("mindio_ttp.framework_ttp", "mindio_ttp.controller_ttp", "mindio_ttp.utils")


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the interface's
        target: ModuleType | None = None,  # noqa: ARG002 - likewise
    ) -> ModuleSpec | None:
        if fullname not in (*_EMPTY, *_FULL):
            return None
        return ModuleSpec(fullname, self, is_package=fullname == "mindio_ttp")

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002 - likewise
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in _FULL:
            given = importlib.import_module(_PROVIDED)
            module.__dict__.update({n: v for n, v in vars(given).items() if n.startswith("tft_") or n in given.__all__})


def of_mindio() -> str:
    """Where MindIO's own ``mindio_ttp`` is installed; empty: nowhere."""
    found = importlib.machinery.PathFinder.find_spec("mindio_ttp")
    return "" if found is None else str(found.origin or next(iter(found.submodule_search_locations or ()), ""))


def install() -> None:
    """From here on ``import mindio_ttp`` finds ours, unless MindIO's is there."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.append(_Finder())
