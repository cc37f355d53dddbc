"""Random numbers that a loader's workers draw: they come with the batches, and go with the first tasks of new workers.

A worker is some batches ahead of the training, so what it draws from now says nothing of the batch that the training
has. It tells with each batch what it draws from behind that one, and a new worker that takes its place is told so with
its first samples. Asking it, or setting a seed for each batch, would give other numbers than without us.

Of a ``DataLoader`` whose batches are torch's own (or torchdata's ``StatefulDataLoader``, which brings new workers to
their turn itself), over a data set whose samples have numbers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from resilient_train.frameworks.torch.kept.generators import host_random_state, restore_random_state
from resilient_train.frameworks.torch.pass_order import read_too
from resilient_train.frameworks.torch.watching.reached import walk

Told = Callable[[int, bytes], None]
"""Called with a batch that is given: a worker, and what it draws from behind it; empty if it was to begin with what it
does not have.
"""

_NEAR, _LONG = 20_000, 1_000
"""So many of the objects that a data set leads to are looked at, the nearest first, and none in a longer container: a
worker that only looks at an object copies the memory that it lies in.
"""


class _Numbers(msgspec.Struct, array_like=True, frozen=True):
    """The global generators of a worker, and the states of those that its data set and its collate function hold."""

    everywhere: bytes
    own: list[tuple[str, bytes]]


_DECODER = msgspec.msgpack.Decoder(_Numbers)


class _Batch(NamedTuple):
    """As a worker gives it. Torch's pinning of memory goes through a named tuple."""

    worker: int
    numbers: bytes
    value: Any


class InWorker:
    """Around the functions that a loader has for its workers. It is forked, or pickled, with both of them."""

    def __init__(self, loader: DataLoader[Any], numbers: Mapping[int, bytes]) -> None:
        """``numbers``: what workers are to begin with, if not with a task."""
        self._numbers_of = numbers
        self._collate = loader.collate_fn
        self._init = loader.worker_init_fn
        self._worker = -1
        self._generators: list[Any] = []
        self._told = b""
        self._missing = False

    def begin(self, worker: int) -> None:
        """Takes the place of ``worker_init_fn``."""
        global _here
        if self._init is not None:
            self._init(worker)
        self._worker = worker
        data_set = getattr(get_worker_info(), "dataset", None)
        self._generators = _generators_of([data_set, self._collate])
        self._told = self._numbers()
        _here = self
        if worker in self._numbers_of:
            self.go_on(self._numbers_of[worker])

    def collate(self, samples: list[Any]) -> Any:
        """Takes the place of ``collate_fn``."""
        value = self._collate(samples)
        if self._missing:
            self._missing = False
            return _Batch(self._worker, b"", value)
        now = self._numbers()
        if now == self._told:
            return value
        self._told = now
        return _Batch(self._worker, now, value)

    def go_on(self, numbers: bytes) -> None:
        """From what another worker of this number had told."""
        held = _DECODER.decode(numbers)
        restore_random_state(held.everywhere)
        self._missing = [kind for kind, _ in held.own] != [_kind(each) for each in self._generators]
        if not self._missing:
            for generator, (_, state) in zip(self._generators, held.own, strict=True):
                _STATES[type(generator)][1](generator, state)
        self._told = self._numbers()

    def _numbers(self) -> bytes:
        own = [(_kind(each), _STATES[type(each)][0](each)) for each in self._generators]
        return msgspec.msgpack.encode(_Numbers(host_random_state(), own))


_here: InWorker | None = None


class Task:
    """Numbers of samples for a worker that is to go on from ``numbers`` with them.

    It says so when it is unpickled: a worker does that when it takes up the task, with nothing between that and its
    samples. What is pickled in its place are the samples' numbers alone, as any data set expects them.
    """

    def __init__(self, numbers: bytes, samples: Any) -> None:
        self._numbers = numbers
        self._samples = samples

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _take_up, (self._numbers, self._samples)


def _take_up(numbers: bytes, samples: Any) -> Any:
    assert _here is not None, "a task came to a process that is no worker of ours"
    _here.go_on(numbers)
    return samples


def with_numbers(loader: DataLoader[Any], told: Told, numbers: Mapping[int, bytes]) -> Iterator[Any]:
    """``iter(loader)``, whose workers tell, and begin with ``numbers`` where it makes them. The loader itself stays as
    it is: the script may iterate over it, too.
    """
    in_worker = InWorker(loader, numbers)
    collate, init = loader.collate_fn, loader.worker_init_fn
    loader.collate_fn, loader.worker_init_fn = in_worker.collate, in_worker.begin
    try:
        return Batches(iter(loader), told)
    finally:
        loader.collate_fn, loader.worker_init_fn = collate, init


class Batches:
    """A loader's, without what its workers have put around them."""

    def __init__(self, iterator: Iterator[Any], told: Told) -> None:
        self._iterator = iterator
        self._say = told

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        if type(batch) is not _Batch:
            return batch
        self._say(batch.worker, batch.numbers)
        return batch.value


def _generators_of(holders: list[Any]) -> list[Any]:
    return [each for each in islice(walk(holders, _leads_to), _NEAR) if _can_tell(each)]


def _leads_to(each: Any) -> Iterable[Any] | None:
    if issubclass(type(each), (list, tuple, dict, set)) and len(each) > _LONG:
        return ()
    return () if type(each) in _STATES else read_too(each)


def _can_tell(each: Any) -> bool:
    """Those of a device can't, in a process that is forked."""
    kind = type(each)
    return kind in _STATES and (kind is not torch.Generator or each.device.type == "cpu")


def _kind(generator: Any) -> str:
    return type(getattr(generator, "bit_generator", generator)).__qualname__


def _as_json(state: Any) -> bytes:
    return json.dumps(state, default=lambda words: words.tolist()).encode()


def _of_python(state: bytes) -> tuple[int, tuple[int, ...], float | None]:
    version, words, kept = json.loads(state)
    return version, tuple(words), kept


_STATES: dict[type, tuple[Callable[[Any], bytes], Callable[[Any, bytes], object]]] = {
    torch.Generator: (
        lambda each: each.get_state().numpy().tobytes(),
        lambda each, state: each.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    np.random.Generator: (
        lambda each: _as_json(each.bit_generator.state),
        lambda each, state: setattr(each.bit_generator, "state", json.loads(state)),
    ),
    np.random.RandomState: (
        lambda each: _as_json(each.get_state(legacy=False)),
        lambda each, state: each.set_state(json.loads(state)),
    ),
    random.Random: (
        lambda each: _as_json(each.getstate()),
        lambda each, state: each.setstate(_of_python(state)),
    ),
}
"""How each kind says its state, and takes one up."""
