"""Copies of a network's state in the memory of the host, from the ends of its last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor

from resilient_train.integrations.mindspore.network_state import State


class HostCopy(NamedTuple):
    """``notes`` are those of ``EndOfLife``."""

    step: int
    values: Mapping[str, np.ndarray]
    notes: dict[str, Any]

    def as_state(self) -> State:
        """Tensors with these values."""
        return {name: Tensor(each) for name, each in self.values.items()}


class HostCopies:
    """The last two of every so many steps: another rank may hang, or see something, one step before this one.

    ``every`` 0: none are kept, unless one is asked for.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._kept: deque[HostCopy] = deque(maxlen=2)

    def is_due(self, step: int) -> bool:
        """Whether this step's end is one to keep."""
        return self._every > 0 and step % self._every == 0

    def keep(self, step: int, state: State, notes: dict[str, Any]) -> None:
        """Copies. Waits for the device."""
        values = {name: np.array(each.asnumpy(), copy=True) for name, each in state.items()}
        self._kept.append(HostCopy(step, values, notes))

    def newest(self) -> HostCopy | None:
        """None where there is none."""
        return self._kept[-1] if self._kept else None

    def back_to(self, step: int) -> HostCopy | None:
        """The copy of ``step``; later ones are forgotten. None where it is not there."""
        while self._kept and self._kept[-1].step > step:
            self._kept.pop()
        found = self.newest()
        return found if found is not None and found.step == step else None

    def __iter__(self) -> Iterator[HostCopy]:
        """The newest first."""
        return iter(tuple(reversed(self._kept)))
