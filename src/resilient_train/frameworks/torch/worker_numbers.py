"""Random numbers that a loader's workers draw: they come with the batches, and go with the first tasks of new workers.

A worker is some batches ahead of the training, so what it draws from now says nothing of the batch that the training
has. It tells with each batch what it draws from behind that one, and a new worker that takes its place is told so with
its first samples. Asking it, or setting a seed for each batch, would give other numbers than without us.

Of a ``DataLoader`` whose batches are torch's own (or torchdata's ``StatefulDataLoader``, which brings new workers to
their turn itself), over a data set whose samples have numbers.
"""

from __future__ import annotations

import functools
import gc
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from resilient_train.frameworks.torch.kept.generators import host_random_state, restore_random_state
from resilient_train.frameworks.torch.pass_order import read_too
from resilient_train.script_place import is_users

Told = Callable[[int, bytes], None]
"""Called with a batch that is given: a worker, and what it draws from behind it; empty if it was to begin with what it
does not have.
"""

_NEAR, _LONG = 5_000, 1_000
"""So many of the objects that a data set leads to are looked at, the nearest first, and none in a longer container: a
worker that only looks at an object copies the memory that it lies in.
"""
_GENERATORS = 32
"""With more than so many of its own, a worker tells nothing of these: each takes some kB with each batch."""


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
        if numbers := self._numbers_of.get(worker):
            self.go_on(numbers)

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
                _STATES[_base(generator)][1](generator, state)
        self._told = self._numbers()

    def _numbers(self) -> bytes:
        own = [(_kind(each), _STATES[_base(each)][0](each)) for each in self._generators]
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
        iterator: Iterator[Any] = hearing(iter(loader), told)
    finally:
        loader.collate_fn, loader.worker_init_fn = collate, init
    return iterator


def hearing(iterator: Any, told: Told) -> Any:
    """Torch's own iterator, which gives batches without what workers have put around them, whoever asks: a loader that
    keeps its workers gives the same iterator to the script.

    ``told`` must not lead to who holds the iterator. Python's collector takes such a cycle apart in any order, and
    torch waits 5 s for each worker that could not be told any more that it is over.
    """
    kind: Any = type(iterator)
    if not issubclass(kind, _Hears):
        iterator.__class__ = _hearing(kind)
    iterator.resilient_told = told
    return iterator


class _Hears:
    """In front of a class of torch's."""

    resilient_told: Told

    def _next_data(self) -> Any:
        batch = super()._next_data()  # type: ignore[misc] # of torch's, which is the next class
        if type(batch) is not _Batch:
            return batch
        self.resilient_told(batch.worker, batch.numbers)
        return batch.value


@functools.cache
def _hearing(kind: Any) -> type:
    return type(kind.__name__, (_Hears, kind), {})


def _generators_of(holders: Iterable[Any]) -> list[Any]:
    """Those that these lead to, the nearest first, in an order that another process finds as well: so none in a set."""
    todo, seen, found = deque(holders), set[int](), list[Any]()
    while todo and len(seen) < _NEAR:
        each = todo.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if _base(each) is not None:
            found.append(each)
        else:
            todo += (one for one in _leads_to(each) if gc.is_tracked(one) or _base(one) is not None)
    found = [each for each in found if _can_tell(each)]
    return found if len(found) <= _GENERATORS else []


def _can_tell(generator: Any) -> bool:
    """Not one of a device, in a process that is forked; nor one of NumPy's over somebody's own source of bits."""
    try:
        return bool(_STATES[_base(generator)][0](generator))
    except Exception:  # somebody's code; a batch that comes out otherwise is told
        return False


def _leads_to(each: Any) -> Iterable[Any]:
    kind = type(each)
    if issubclass(kind, (set, frozenset)):
        return ()
    for base in (list, tuple, dict):
        if issubclass(kind, base) and base.__len__(each) > _LONG:
            return ()
    if issubclass(kind, np.ndarray) and each.size > _LONG:
        return ()
    if issubclass(kind, ModuleType):
        file = getattr(each, "__file__", None)
        of_it = list(vars(each).values()) if file and is_users(file) else []
        return [one for one in of_it if _base(one) is not None or type(one) is FunctionType]
    return read_too(each) or ()


@functools.cache
def _base_of(kind: Any) -> type | None:
    return next((base for base in _STATES if issubclass(kind, base)), None)


def _base(each: Any) -> Any:
    kind: Any = type(each)
    return _base_of(kind)


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
        lambda each: _as_json(random.Random.getstate(each)),
        lambda each, state: random.Random.setstate(each, _of_python(state)),
    ),
}
"""How each kind says its state, and takes one up. What a class of the script's has made of that is not asked."""
