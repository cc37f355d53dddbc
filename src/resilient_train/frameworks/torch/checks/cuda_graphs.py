"""CUDA graphs, which a Session refuses while its loop runs.

A graph has the addresses that it was captured with. A step that is redone may begin with gradients in other memory, and
state that was damaged gets other memory: the graph would go on with what lay there before, and nobody would notice. The
collectives in it are neither seen nor cut.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from resilient_train.errors import UsageError
from resilient_train.script_place import line

_CALLS = ("capture_begin", "replay")


class Refusal:
    """From now on, until ``remove``."""

    def __init__(self) -> None:
        self._kind: Any = torch.cuda.CUDAGraph
        self._were = {name: getattr(self._kind, name) for name in _CALLS}
        for name in _CALLS:
            setattr(self._kind, name, _refuse)

    def remove(self) -> None:
        for name, was in self._were.items():
            setattr(self._kind, name, was)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        f"{line()}: a CUDA graph is captured or replayed: it has the addresses of gradients and state, which may be "
        "others behind a fault, so it would compute with what lay there before; and a collective in it can't be cut. "
        'Leave graphs out (torch.compile without mode="reduce-overhead")'
    )
