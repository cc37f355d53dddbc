"""How long this process has waited for other ranks: in the ``wait`` of a work, and where a backward pass ends.

DDP's reducer waits in C++, at the end of a backward pass, for all collectives that the pass has begun. Nobody is told
when that begins. But what a pass still computes behind its last collective is next to nothing, for that one carries the
gradients that come last. So its wait is taken to begin there, and it ends with the last of the pass's collectives.

(Not so in a pass inside another one, ``checkpoint(use_reentrant=True)``: there each segment is taken for a pass, and
what is computed behind its collectives for waiting.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

_NO_PASS = -1
_pass_under_way = torch._C._current_graph_task_id


class CollectiveWaits:
    """Of all groups of this process; told by whatever begins, ends and waits for works."""

    def __init__(self) -> None:
        self._total_ns = 0
        self._pass = _NO_PASS
        self._begun_ns = 0
        """When the newest backward pass has begun its last collective."""
        self._since_ns = 0
        """How long it has waited in Python since then."""
        self.ended_ns = 0
        """When a work has last ended."""

    def begun(self) -> None:
        """A collective was handed over, and the caller goes on."""
        number = _pass_under_way()
        if number == _NO_PASS:
            return
        if number != self._pass:
            self._end_pass()
            self._pass = number
        self._begun_ns, self._since_ns = time.monotonic_ns(), 0

    def until(self, wait: Callable[[], Any]) -> None:
        """Waits. Only in a thread that the training needs to go on: the main one, or one of autograd's."""
        begun_ns = time.monotonic_ns()
        try:
            wait()
        finally:
            duration_ns = time.monotonic_ns() - begun_ns
            number = _pass_under_way()
            if number != _NO_PASS or threading.get_ident() == threading.main_thread().ident:
                self._total_ns += duration_ns
            if number == self._pass:
                self._since_ns += duration_ns

    def total_ns(self) -> int:
        """So far. No backward pass is under way."""
        self._end_pass()
        return self._total_ns

    def _end_pass(self) -> None:
        if self._pass != _NO_PASS:
            self._total_ns += max(0, self.ended_ns - self._begun_ns - self._since_ns)
            self._pass = _NO_PASS


waits = CollectiveWaits()
