"""A few words of the parameters, other ones each time: did they change although no registered optimizer has stepped?

torch's version counters can't tell: they do not see what is written to ``parameter.data``. Only memory of the host is
looked at, because a look into a device's would wait for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from resilient_train.frameworks.torch.tensors.leaves import memory_of

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
            if parameter.requires_grad and memory_of(parameter).nbytes >= _WORD_BYTES
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
            memory = memory_of(parameter)
            words = max(1, memory.nbytes // _WORD_BYTES)
            offset = round_number * _STRIDE % words * _WORD_BYTES
            value = _word(memory, offset)
            if value is not None:
                self._taken.append(Sample(name, parameter, offset, value))

    def changed(self) -> Sample | None:
        """Of a parameter that is not any more what it was when ``take`` was called; None if none was seen."""
        words = ((each, _word(memory_of(each.parameter), each.offset)) for each in self._taken)
        return next((each for each, word in words if word != each.value), None)


def _word(memory: torch.Tensor, offset: int) -> int | None:
    if not memory.is_cpu or not memory.is_contiguous() or offset + _WORD_BYTES > memory.nbytes:
        return None
    return ctypes.c_uint32.from_address(memory.data_ptr() + offset).value
