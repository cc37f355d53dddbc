"""Code that ``torch.compile`` has compiled by the order in which shapes came.

Its first shape gets a kernel of its own, and when another one comes, one for all of that kind. A process that takes a
rank's place meets the shapes in another order, so another kernel may work on the same batch, and add in another order.
Likewise where so many were compiled that torch gives up, and runs the code as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


class CompiledShapes:
    """What the process has compiled since it was asked first: what came before the loop, a new process does as well."""

    def __init__(self) -> None:
        self._before: set[tuple[str, str]] | None = None
        self._compiled = 0
        self._found = ""

    def changing(self) -> str:
        """Where the code stands; empty: there is none. In each step."""
        torchs: Any = sys.modules.get("torch._dynamo.convert_frame")
        compiled = torchs.FRAME_COMPILE_COUNTER.total() if torchs is not None else 0
        if self._before is None:
            self._before, self._compiled = set(_changing()), compiled
        elif compiled != self._compiled and not self._found:
            self._compiled = compiled
            self._found = next((each[0] for each in _changing() if each not in self._before), "")
        return self._found


def _changing() -> Iterator[tuple[str, str]]:
    """Where, and what of it."""
    notes: Any = sys.modules.get("torch._dynamo.pgo")
    for code, state in (getattr(notes, "_CODE_STATE", None) or {}).items():
        for name, entry in state.automatic_dynamic.items():
            if sizes := _for_many(entry, notes.auto_dynamic):
                yield f"{code.filename}:{code.firstlineno}", f"{name} {sizes}"
    torchs: Any = sys.modules.get("torch._dynamo.convert_frame")
    config: Any = sys.modules.get("torch._dynamo.config")
    if torchs is not None and config is not None:
        limit = config.recompile_limit
        if any(count > limit for count in torchs.FRAME_COMPILE_COUNTER.values()):
            yield f"more than {limit} times for one function", ""


def _for_many(entry: Any, dynamic: Any) -> list[int]:
    """Which sizes of a tensor change: they have a mark. A number that changes is all mark."""
    if isinstance(entry.size, tuple):
        return [at for at, size in enumerate(entry.size) if size is dynamic]
    return [-1] if entry.size is dynamic and entry.scalar is dynamic else []
