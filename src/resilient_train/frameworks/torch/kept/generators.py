"""The global random numbers of a process, as bytes: Python's, NumPy's and torch's, and those of its devices.

They are asked for three times a step, and asking all three takes 60 us. Each is a Mersenne Twister, 624 words and a
position, which is looked at where it lies in memory: while it stands still (half a microsecond tells), what was read
last is still true. Where it lies is found out by comparing; a generator that lies elsewhere is asked each time.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from resilient_train._native import Glance
from resilient_train.frameworks.accelerator import Accelerator, Host

_WORDS = 624
_TWISTER = struct.Struct(f"=i{_WORDS}I")
"""As Python has it: the position, then the words. NumPy has it the other way round."""
_TORCH_STATE = struct.Struct(f"=Qiiq{_WORDS}Q")
"""What ``torch.get_rng_state`` begins with: seed, words left, whether seeded, position, the words at double width."""
_TORCH_HEAD_BYTES = 24
"""In memory, seed, words left, whether seeded and position stand before the words ..."""
_TORCH_KEPT_BYTES = 24
"""... and the normal numbers that are kept from the draw before (a float, a double, with a flag each) behind them."""
_TORCH_SEARCH_BYTES = 256

_GENERATORS = 3
_NumpyState = tuple[str, bytes, int, int, float]
T = TypeVar("T")


class _RandomState(msgspec.Struct, array_like=True, frozen=True):
    """Of the generators of Python (with the second normal number that it may keep), NumPy and torch, of the CUDA
    devices if they were used, and of the rank's accelerator if that has one.
    """

    python: bytes
    python_kept: float | None
    numpy: tuple[str, bytes, int, int, float]
    torch: bytes
    cuda: list[bytes]
    device: bytes = b""


_DECODER = msgspec.msgpack.Decoder(_RandomState)
_ENCODER = msgspec.msgpack.Encoder()


class _Held(Generic[T]):
    """What a generator was when it was last asked, and whether it may be that still."""

    __slots__ = ("glance", "of", "span", "state")

    def __init__(self, of: object, span: tuple[int, int] | None) -> None:
        self.of = of
        self.span = span
        self.glance = Glance([span]) if span is not None else None
        self.state: T | None = None

    def read(self, ask: Callable[[], T]) -> T:
        """The present state; the same object while the generator stands still."""
        moved = self.glance is None or self.glance.changed()
        if moved or self.state is None:
            self.state = ask()
        return self.state


class _Newest:
    """What was read last: the parts, the whole, and glances at all three generators, of which two can be exchanged, and
    at these two alone.
    """

    __slots__ = ("glance", "numpy", "others", "parts", "python", "whole")

    def __init__(self, python: Any, numpy: object, spans: list[tuple[int, int]]) -> None:
        self.python = python
        self.numpy = numpy
        self.glance = Glance(spans)
        self.others = Glance(spans[:2])
        self.parts: tuple[bytes, float | None, _NumpyState, bytes] = b"", None, ("", b"", 0, 0, 0.0), b""
        self.whole = b""

    def take(self, parts: tuple[bytes, float | None, _NumpyState, bytes], whole: bytes) -> None:
        """These were read just now."""
        self.parts = parts
        self.whole = whole
        self.glance.changed()
        self.others.changed()


_python_held: _Held[bytes] = _Held(None, None)
_numpy_held: _Held[_NumpyState] = _Held(None, None)
_torch_held: _Held[bytes] = _Held(None, None)
_newest: _Newest | None = None
_accelerator: Accelerator = Host()
_on_host = True
_random: Any = random
_get_bit_generator: Callable[[], object] = np.random.get_bit_generator  # type: ignore[attr-defined] # missing in NumPy's stub


def follow(accelerator: Accelerator) -> None:
    """From now on its generator counts as one of the process's."""
    global _accelerator, _on_host
    _accelerator, _on_host = accelerator, isinstance(accelerator, Host)


def random_state() -> bytes:
    """The states of the process's global generators; on the host alone the same object while nothing was drawn.

    Three times a step, and in many once with torch's moved (by dropout): those two cases go through no other function.
    """
    newest = _newest
    if newest is None or not _on_host or torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        return _read_all()
    generator: Any = _random.getstate.__self__
    numpy_kept = newest.parts[2][3]  # a normal number kept by NumPy may have been used up unseen
    if (
        numpy_kept
        or generator is not newest.python
        or generator.gauss_next is not newest.parts[1]
        or _get_bit_generator() is not newest.numpy
    ):
        return _read_all()
    if newest.glance.changed():
        if newest.others.changed():
            return _read_all()
        python, kept, numpy, _ = newest.parts
        newest.parts = python, kept, numpy, torch.get_rng_state().numpy().tobytes()
        newest.whole = _ENCODER.encode((*newest.parts, ()))
    return newest.whole


def host_random_state() -> bytes:
    """The same without any device's, which a forked process can't ask."""
    return _ENCODER.encode((*_host_parts(), ()))


def _host_parts() -> tuple[bytes, float | None, _NumpyState, bytes]:
    return *_python_state(), _numpy_state(), _torch_state()


def _read_all() -> bytes:
    global _newest
    parts = _host_parts()
    of_device = _accelerator.random_state()
    if of_device is not None:
        return _ENCODER.encode((*parts, (), of_device.numpy().tobytes()))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        cuda = [each.numpy().tobytes() for each in torch.cuda.get_rng_state_all()]
        return _ENCODER.encode((*parts, cuda))
    whole = _ENCODER.encode((*parts, ()))
    spans = [each.span for each in (_python_held, _numpy_held, _torch_held) if each.span is not None]
    python, numpy = _python_held.of, _numpy_held.of
    if _newest is None or _newest.python is not python or _newest.numpy is not numpy:
        _newest = _Newest(python, numpy, spans) if len(spans) == _GENERATORS else None
    if _newest is not None:
        _newest.take(parts, whole)
    return whole


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
    if held.device:
        _accelerator.restore_random_state(_bytes_tensor(held.device))


def by_generator(state: bytes) -> dict[str, Any]:
    """What ``random_state`` returned, taken apart: the name of each generator, and its state."""
    held = _DECODER.decode(state)
    parts = {"python": (held.python, held.python_kept), "numpy": held.numpy, "torch": held.torch}
    devices = {"cuda": held.cuda, "device": held.device}
    return parts | {name: state for name, state in devices.items() if state}


def _python_state() -> tuple[bytes, float | None]:
    global _python_held
    generator = _python_generator()
    if not _lies_behind_its_head():
        return _python_state_asked()
    address = id(generator) + object.__basicsize__
    if _python_held.of is not generator:
        _python_held = _Held(generator, (address, _TWISTER.size))
    return _python_held.read(lambda: ctypes.string_at(address, _TWISTER.size)), generator.gauss_next


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


def _numpy_state() -> _NumpyState:
    """The state of NumPy's global generator.

    While its words stand still nothing was drawn, except a second normal number that was kept from the first draw; the
    words don't show that one, so a state with such a number kept is always asked for.
    """
    global _numpy_held
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # missing in NumPy's stub
    if _numpy_held.of is not generator:
        # Where NumPy's ctypes interface says they lie.
        twister = isinstance(generator, np.random.MT19937)
        span = (generator.ctypes.state_address, _TWISTER.size) if twister else None
        _numpy_held = _Held(generator, span)
    if _numpy_held.state is not None and _numpy_held.state[3]:
        _numpy_held.state = None
    return _numpy_held.read(_numpy_state_asked)


def _numpy_state_asked() -> _NumpyState:
    kind, keys, position, has_gauss, cached = cast(
        "tuple[str, npt.NDArray[np.uint32], int, int, float]",
        np.random.get_state(legacy=True),  # noqa: NPY002 - the global generator is what user code draws from
    )
    return kind, keys.tobytes(), int(position), int(has_gauss), float(cached)


def _torch_state() -> bytes:
    global _torch_held
    if _torch_held.of is None:
        _torch_held = _Held(torch.default_generator, _torch_span(torch.default_generator))
    return _torch_held.read(_torch_state_asked)


def _torch_state_asked() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _torch_span(generator: torch.Generator) -> tuple[int, int] | None:
    """Where ``generator`` lies, found in a generator of its kind whose words are known; None if it looks otherwise.

    Between the two draws of the test only the number that is kept from the first one is used up: it must show.
    """
    sample = torch.Generator()
    sample.manual_seed(1)
    base = _torch_address(sample)
    words = struct.pack(f"={_WORDS}I", *_TORCH_STATE.unpack_from(sample.get_state().numpy().tobytes())[4:])
    place = ctypes.string_at(base, _TORCH_SEARCH_BYTES).find(words[:64]) - _TORCH_HEAD_BYTES
    size = _TORCH_HEAD_BYTES + len(words) + _TORCH_KEPT_BYTES
    if place < 0 or ctypes.string_at(base + place + _TORCH_HEAD_BYTES, len(words)) != words:
        return None
    look = Glance([(base + place, size)])
    moved = [look.changed()]
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
        torch.randn(1, generator=sample, dtype=dtype, device="cpu")
        moved.append(look.changed())
    return (_torch_address(generator) + place, size) if all(moved) and not look.changed() else None


def _torch_address(generator: torch.Generator) -> int:
    return cast("int", cast("Any", generator)._cdata)


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
