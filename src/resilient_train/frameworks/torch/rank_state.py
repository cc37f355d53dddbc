"""What a rank has that no replica does: its random numbers, its unsynchronised buffers, what the user calls its own.

All of it is published before the commit point of each update, so it is kept small: a buffer counts only from the moment
that it changes for the first time (masks and tables never do; a replica's or the constructor's are as good).
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from resilient_train.frameworks.torch.replicated import restore_object, state_of

_MERSENNE_TWISTER_BYTES = 4 * 624 + 4

# Their kernels write the running statistics without telling the version counter.
_SILENT_WRITERS = (torch.nn.modules.batchnorm._NormBase,)


class _RandomState(msgspec.Struct, array_like=True, frozen=True):
    """Of the generators of Python, NumPy and torch, and of the CUDA devices if they were used."""

    python: tuple[int, tuple[int, ...], float | None]
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
    mine = _RandomState(random.getstate(), _numpy_state(), torch.get_rng_state().numpy().tobytes(), cuda)
    return _ENCODER.encode(mine)


def _numpy_state() -> tuple[str, bytes, int, int, float]:
    """The state of NumPy's global generator.

    Asking NumPy takes 60 us, three times a step. So look at its words first, where its ctypes interface says they lie
    (0.5 us): while they stand still nothing was drawn, except a second normal number that was kept from the first draw;
    the words don't show that one, so a state with such a number kept is always asked for.
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
    """The Mersenne Twister's 624 words and its position, as they lie in memory; empty for another generator."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # missing in NumPy's stub
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _MERSENNE_TWISTER_BYTES)


def restore_random_state(state: bytes) -> None:
    """Puts back what ``random_state`` returned."""
    held = _DECODER.decode(state)
    random.setstate(held.python)
    kind, keys, position, has_gauss, cached = held.numpy
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002 - see above
    torch.set_rng_state(_bytes_tensor(held.torch))
    if held.cuda:
        torch.cuda.set_rng_state_all([_bytes_tensor(each) for each in held.cuda])


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Buffers:
    """The models' buffers that have changed since the start; ``changed`` finds new ones by version and address."""

    def __init__(self, models: tuple[torch.nn.Module, ...]) -> None:
        self._models = models
        self._live: set[str] = set()
        self._quiet: dict[str, tuple[torch.nn.Module, str, int, int]] = {}
        self._first: dict[str, torch.Tensor] = {}
        for index, model in enumerate(models):
            for prefix, module in model.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    key = f"{index}.{prefix}.{name}"
                    self._quiet[key] = (module, name, buffer._version, buffer.data_ptr())
                    if isinstance(module, _SILENT_WRITERS):
                        self._live.add(key)
                    else:
                        self._first[key] = buffer.detach().clone()
        self._all = {key: (module, name) for key, (module, name, _, _) in self._quiet.items()}
        for key in self._live:
            del self._quiet[key]

    def changed(self) -> dict[str, torch.Tensor]:
        """The buffers that are this rank's own, by key; not copied."""
        for key, (module, name, version, address) in list(self._quiet.items()):
            buffer = module._buffers[name]
            if buffer is not None and (buffer._version != version or buffer.data_ptr() != address):
                self._live.add(key)
                del self._quiet[key]
        return {key: self._present(key) for key in sorted(self._live)} if self._live else {}

    def _present(self, key: str) -> torch.Tensor:
        module, name = self._all[key]
        return cast("torch.Tensor", module._buffers[name])  # None only if the model takes a buffer away while it trains

    def restore(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copies ``values`` into the buffers of those keys, in place: DDP and captured graphs hold on to them."""
        with torch.no_grad():
            for key, value in values.items():
                self._present(key).copy_(value)
                self._live.add(key)
                self._quiet.pop(key, None)

    def rollback(self, values: Mapping[str, torch.Tensor]) -> None:
        """Back to ``values``; a buffer that changed for the first time since then goes back to its first value."""
        news = {key: first for key, first in self._first.items() if key in self.changed() and key not in values}
        self.restore({**values, **news})


class RankState:
    """All of it together, as one tree."""

    def __init__(self, models: tuple[torch.nn.Module, ...], extra: Mapping[str, Any]) -> None:
        self.buffers = Buffers(models)
        self._extra = extra

    def capture(self) -> dict[str, Any]:
        """The present state without the random numbers, empty if there is none; buffers are references, to be packed or
        cloned before they change.
        """
        buffers = self.buffers.changed()
        if not buffers and not self._extra:
            return {}
        return {"buffers": buffers, "extra": self.extra_states()}

    def extra_states(self) -> dict[str, Any]:
        """The states of what the user registered as each rank's own."""
        return {name: state_of(each) for name, each in self._extra.items()}

    def restore_extra(self, states: Mapping[str, Any]) -> None:
        """The inverse of ``extra_states``."""
        for name, value in states.items():
            restore_object(self._extra[name], value)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts a captured state back, in this process or in another that built the same model."""
        if state:
            self.buffers.restore(state["buffers"])
            self.restore_extra(state["extra"])
