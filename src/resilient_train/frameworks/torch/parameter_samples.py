"""A few words of the parameters, other ones each time: did they change although no registered optimizer has stepped?

torch's version counters can't tell: they do not see what is written to ``parameter.data``. Only memory of the host is
looked at, because a look into a device's would wait for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from resilient_train.frameworks.torch.leaves import local

_WORDS = 2
"""At each look, which is once a window: 2.5 us. An update changes nearly all words, and with other words each time one
that changes few is found as well.
"""
_WORD_BYTES = 4
_STRIDE = 2654435761
"""A prime, so that one day each word of a parameter is looked at, in no order."""


class Sample(NamedTuple):
    """A word of a parameter, and where it lies."""

    name: str
    parameter: torch.nn.Parameter
    offset: int
    value: int


class Samples:
    """Of the models' parameters that are trained."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._parameters = [
            (name, parameter)
            for model in models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and _size(parameter) >= _WORD_BYTES
        ]
        self._taken: list[Sample] = []
        self._turn = 0

    def take(self) -> None:
        """Remembers some words."""
        self._taken.clear()
        for _ in range(min(_WORDS, len(self._parameters))):
            self._turn += 1
            round_number, index = divmod(self._turn, len(self._parameters))
            name, parameter = self._parameters[index]
            words = max(1, _size(parameter) // _WORD_BYTES)
            offset = round_number * _STRIDE % words * _WORD_BYTES
            value = _word(parameter, offset)
            if value is not None:
                self._taken.append(Sample(name, parameter, offset, value))

    def changed(self) -> Sample | None:
        """Of a parameter that is not any more what it was when ``take`` was called; None if none was seen."""
        return next((each for each in self._taken if _word(each.parameter, each.offset) != each.value), None)


def _size(parameter: torch.nn.Parameter) -> int:
    held = local(parameter)
    return held.numel() * held.element_size()


def _word(parameter: torch.nn.Parameter, offset: int) -> int | None:
    held = local(parameter)
    if not held.is_cpu or not held.is_contiguous() or offset + _WORD_BYTES > held.numel() * held.element_size():
        return None
    return ctypes.c_uint32.from_address(held.data_ptr() + offset).value
