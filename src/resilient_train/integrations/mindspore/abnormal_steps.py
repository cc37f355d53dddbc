"""Losses and gradient norms that are no numbers, or too large: which steps run again for them, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from resilient_train.errors import UsageError
from resilient_train.state import abnormal


class AbnormalSteps:
    """Of one rank, in ``abnormal_global_norm.json`` and ``abnormal_loss.json``, see ``state/abnormal.py``.

    ``limits``: what -> from which value on it is abnormal. ``norm``: takes the global norm from what the network that
    trains returns; the loss is that itself, or the first of several. Raises ConfigError for files that aren't ours.
    """

    def __init__(self, folder: Path, limits: dict[str, float], norm: Callable[[Any], Any] | None) -> None:
        self._folder, self._limits, self._norm = folder, limits, norm
        self._values = abnormal.read(folder)
        self._again: set[tuple[str, int]] = set()
        """Recorded in this life, and not yet run again."""

    def look(self, step: int, outputs: Any) -> str:
        """Why ``step`` is to be run again; empty if it is not. No step is twice: what is the same again is the data's.

        Waits for the device. Raises UsageError for a network that returns no loss.
        """
        told = [self._look_at(what, step, value) for what, value in self._given(outputs)]
        return "; ".join(filter(None, told))

    def _given(self, outputs: Any) -> list[tuple[str, float]]:
        loss = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        try:
            found = [("loss", _worst(loss))]
            if self._norm is not None:
                found.append(("norm", _worst(self._norm(outputs))))
        except (AttributeError, TypeError, IndexError) as error:
            raise UsageError(f"TRE is on, and the network that trains returns no loss or norm ({error})") from error
        return found

    def _look_at(self, what: str, step: int, value: float) -> str:
        wrong = not np.isfinite(value) or value >= self._limits[what]
        key = (what, step)
        if not wrong and key not in self._again:
            return ""
        known = key in self._values
        self._again.discard(key)
        if not known:
            self._again.add(key)
        self._values[key] = (*self._values.get(key, ()), value)
        self._folder.mkdir(parents=True, exist_ok=True)
        own = {number: values for (kind, number), values in self._values.items() if kind == what}
        abnormal.write(self._folder, what, own)
        return "" if known else f"the {what} of step {step} is {value:.9g}, the limit {self._limits[what]:g}"


def _worst(value: Any) -> float:
    """One that is not finite, or else the largest."""
    numbers = np.asarray(value.asnumpy(), dtype=np.float64).reshape(-1)
    odd = numbers[~np.isfinite(numbers)]
    return float(odd[0] if odd.size else numbers.max())
