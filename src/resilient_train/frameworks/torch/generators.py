"""The global random numbers of a process, as bytes: Python's, NumPy's and torch's.

They are asked for three times a step, and asking Python and NumPy takes 50 us. Both hold a Mersenne Twister: 624 words
and a position. So these are looked at where they lie in memory, which takes 1 us.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

_WORDS = 624
_TWISTER = struct.Struct(f"=i{_WORDS}I")
"""As Python has it: the position, then the words. NumPy has it the other way round."""


class _RandomState(msgspec.Struct, array_like=True, frozen=True):
    """Of the generators of Python (with the second normal number that it may keep), NumPy and torch, and of the CUDA
    devices if they were used.
    """

    python: bytes
    python_kept: float | None
    numpy: tuple[str, bytes, int, int, float]
    torch: bytes
    cuda: list[bytes]


_DECODER = msgspec.msgpack.Decoder(_RandomState)
_ENCODER = msgspec.msgpack.Encoder()
_numpy_glance: tuple[bytes, tuple[str, bytes, int, int, float]] | None = None
"""The words of NumPy's generator when its whole state was last asked for, and that state."""


def random_state() -> bytes:
    """The states of Python's, NumPy's and torch's global generators."""
    cuda: list[bytes] = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        cuda = [each.numpy().tobytes() for each in torch.cuda.get_rng_state_all()]
    torch_state = torch.get_rng_state().numpy().tobytes()
    return _ENCODER.encode(_RandomState(*_python_state(), _numpy_state(), torch_state, cuda))


def restore_random_state(state: bytes) -> None:
    """Puts back what ``random_state`` returned."""
    held = _DECODER.decode(state)
    position, *words = _TWISTER.unpack(held.python)
    random.setstate((random.Random.VERSION, (*words, position), held.python_kept))
    kind, keys, position, has_gauss, cached = held.numpy
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002 - see below
    torch.set_rng_state(_bytes_tensor(held.torch))
    if held.cuda:
        torch.cuda.set_rng_state_all([_bytes_tensor(each) for each in held.cuda])


def _python_state() -> tuple[bytes, float | None]:
    generator = _python_generator()
    if _lies_behind_its_head():
        return ctypes.string_at(id(generator) + object.__basicsize__, _TWISTER.size), generator.gauss_next
    return _python_state_asked()


def _python_state_asked() -> tuple[bytes, float | None]:
    _, (*words, position), kept = random.getstate()
    return _TWISTER.pack(position, *words), kept


def _python_generator() -> Any:
    """The object behind the functions of ``random``."""
    return cast("Any", random.getstate).__self__


@functools.cache
def _lies_behind_its_head() -> bool:
    """Whether Python's generator lies in memory as CPython has had it since 2.3, found out by comparing."""
    size = object.__basicsize__ + _TWISTER.size
    if sys.implementation.name != "cpython" or type(_python_generator()).__basicsize__ < size:
        return False
    words, _ = _python_state_asked()
    return ctypes.string_at(id(_python_generator()) + object.__basicsize__, _TWISTER.size) == words


def _numpy_state() -> tuple[str, bytes, int, int, float]:
    """The state of NumPy's global generator.

    While its words stand still nothing was drawn, except a second normal number that was kept from the first draw; the
    words don't show that one, so a state with such a number kept is always asked for.
    """
    global _numpy_glance
    words = _numpy_words()
    if _numpy_glance is not None and words and _numpy_glance[0] == words and not _numpy_glance[1][3]:
        return _numpy_glance[1]
    kind, keys, position, has_gauss, cached = cast(
        "tuple[str, npt.NDArray[np.uint32], int, int, float]",
        np.random.get_state(legacy=True),  # noqa: NPY002 - the global generator is what user code draws from
    )
    state = kind, keys.tobytes(), int(position), int(has_gauss), float(cached)
    _numpy_glance = words, state
    return state


def _numpy_words() -> bytes:
    """The Mersenne Twister's words and its position, where NumPy's ctypes interface says they lie; empty for another
    generator.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # missing in NumPy's stub
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER.size)


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
