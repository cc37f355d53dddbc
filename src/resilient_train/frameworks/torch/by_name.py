"""Who has taken torch's ``init_process_group`` by its name before this package could put its own in its place."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

_NAME = "init_process_group"


def taken_by_name() -> str:
    """FILE:LINE of a ``from torch.distributed import init_process_group`` that came too early; empty: there is none."""
    stock = getattr(dist.init_process_group, "__wrapped__", None)
    modules = dict(sys.modules)
    first = [name for name in ("__main__", "__mp_main__") if name in modules]
    for name in [*first, *modules]:
        module = modules[name]
        if stock is None or not isinstance(module, ModuleType) or name.partition(".")[0] == "torch":
            continue
        if any(value is stock for value in list(vars(module).values())):
            file = getattr(module, "__file__", None)
            return f"{file}:{_line(file)}" if file else name
    return ""


def _line(file: str) -> int:
    """Where the file imports it from torch.distributed, as far as its text tells; else its first line."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 1
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    of_torch = (node for node in froms if (node.module or "").startswith("torch.distributed"))
    return next((node.lineno for node in of_torch if {each.name for each in node.names} & {_NAME, "*"}), 1)
