"""Random numbers, and a loader from its n-th batch on: this module is ``frameworks/roles.Data``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.utils.data._utils.signal_handling as torch_signals
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from resilient_train._native import shield_worker
from resilient_train.frameworks.roles import Strides, Workers
from resilient_train.frameworks.torch.checks.arguments import look
from resilient_train.frameworks.torch.kept.batch_copy import RememberedBatch as remember  # noqa: N813 - a verb
from resilient_train.frameworks.torch.kept.generators import random_state, restore_random_state
from resilient_train.frameworks.torch.tensors.leaves import pack, unpack
from resilient_train.frameworks.torch.tensors.shared_batch import share
from resilient_train.frameworks.torch.worker_numbers import InWorker, Task, Told, hearing, with_numbers

__all__ = [
    "fast_forward",
    "iterate",
    "look",
    "pack",
    "random_state",
    "remember",
    "restore_random_state",
    "restore_states",
    "share",
    "shield_workers",
    "states",
    "strides",
    "unpack",
    "workers",
]


_OF_TORCH = ("__iter__", "_get_iterator", "_index_sampler")
"""What gives a DataLoader's batches."""


def strides(loader: Any) -> Strides | None:
    """Known of a DataLoader with a DistributedSampler, both as torch made them."""
    sampler = getattr(loader, "sampler", None)
    plain = _skips_by_index(loader) and type(loader.batch_sampler) is BatchSampler
    if not plain or not isinstance(sampler, DistributedSampler) or loader.batch_size is None:
        return None
    if type(sampler).__iter__ is not DistributedSampler.__iter__:
        return None
    return Strides(loader.batch_size, sampler.num_replicas, sampler.num_samples)


def shield_workers() -> None:
    """A SIGTERM to all processes of a job ends no worker that is forked from now on. In a rank that has lost a worker
    torch raises wherever it is: its last step could not be ended, and nothing would be saved.

    torch sets a worker's handler itself, behind all that a fork hook or the parent could set, so its function is
    wrapped. A worker that is spawned imports torch anew, and is not shielded.
    """
    _torch_signals._set_worker_signal_handlers = _set_worker_handlers


_torch_signals: Any = torch_signals  # what it takes from torch._C it does not say to export
_set_torchs_handlers: Callable[[], None] = _torch_signals._set_worker_signal_handlers


def _set_worker_handlers() -> None:
    _set_torchs_handlers()
    shield_worker()


def states(generators: Sequence[Any]) -> bytes:
    """In each step, so torch's own are not packed as trees."""
    return msgspec.msgpack.encode(
        [
            each.get_state().numpy().tobytes() if isinstance(each, torch.Generator) else pack(each.get_state())
            for each in generators
        ]
    )


def restore_states(generators: Sequence[Any], states: bytes) -> None:
    for each, state in zip(generators, msgspec.msgpack.decode(states, type=list[bytearray]), strict=True):
        torchs = isinstance(each, torch.Generator)
        each.set_state(torch.frombuffer(state, dtype=torch.uint8) if torchs else unpack(bytes(state)))


def workers(loader: Any) -> Workers:
    """Only a DataLoader with ``persistent_workers`` keeps them."""
    if not getattr(loader, "persistent_workers", False):
        return Workers.MADE_ANEW
    return Workers.KEPT if getattr(loader, "_iterator", None) is None else Workers.THERE


def iterate(loader: Any, told: Told, numbers: Mapping[int, bytes], *, anew: bool) -> Iterator[Any]:
    """``iter(loader)``; a batch that is drawn by a worker says what that goes on from.

    ``numbers``: by worker, what those begin with that a loader makes which keeps its place itself.
    """
    if anew and getattr(loader, "persistent_workers", False):
        loader._iterator = None
    if isinstance(loader, _Rest):
        return hearing(iter(loader), told) if loader.num_workers else iter(loader)
    tells = _skips_by_index(loader) or _keeps_each_place(loader)
    return with_numbers(loader, told, numbers) if tells and loader.num_workers else iter(loader)


def _keeps_each_place(loader: Any) -> bool:
    """Whether it is torchdata's, which makes new workers stand where the old ones were. Not where it says that seldom,
    and draws what is between; nor where each worker goes through the data set by itself.
    """
    there = sys.modules.get("torchdata.stateful_dataloader")
    return (
        there is not None
        and isinstance(loader, there.StatefulDataLoader)
        and type(loader).__iter__ is there.StatefulDataLoader.__iter__
        and loader.snapshot_every_n_steps == 1
        and not isinstance(loader.dataset, IterableDataset)
    )


def fast_forward(
    loader: Any,
    batches: int,
    samples: int = 0,
    begin: Callable[[Any], Iterator[Any]] = iter,
    numbers: Mapping[int, bytes] = {},
) -> Iterator[Any]:
    """An iterator over ``loader`` that starts at batch ``batches``, counted behind the first ``samples`` samples.

    Must be called with the random state that the epoch began with: loader and sampler draw their seeds in here, in the
    order in which they draw them at the start of an epoch. Nothing else is drawn.

    ``numbers``: by worker, what those begin with that have drawn before.
    """
    if isinstance(loader, _Rest):
        assert not batches, "a loader that stands for another one is begun anew"
        loader.rest.whole()
    elif (batches or samples or numbers) and _skips_by_index(loader):
        rest = _RestOfBatches(_behind(loader, samples), batches, numbers, loader.num_workers)
        iterator = begin(_Rest(loader, rest))
        if rest.iterator is not None:
            rest.iterator.skip()
        return iterator
    iterator = begin(loader)
    _consume(iterator, batches)
    return iterator


def _skips_by_index(loader: Any) -> bool:
    """Whether another DataLoader, over fewer batches, gives what is left of this one. Not where a class of the user's
    makes something of the batches (``__iter__``), and not where the dataset itself says what comes next.
    """
    kind = type(loader)
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and all(getattr(kind, name) is getattr(DataLoader, name) for name in _OF_TORCH)
    )


def _behind(loader: DataLoader[Any], samples: int) -> Any:
    """The loader's batches without its sampler's first ``samples``."""
    if not samples:
        return loader.batch_sampler
    assert loader.batch_size is not None, "samples are skipped only where the loader makes batches of them"
    return BatchSampler(_Samples(loader.sampler, samples), loader.batch_size, loader.drop_last)


class _Samples:
    """A sampler without its first samples."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._skipped, None)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skipped)


class _RestOfBatches:
    """A batch sampler without its first batches: what they name is never loaded."""

    def __init__(self, batch_sampler: Any, batches: int, numbers: Mapping[int, bytes], workers: int) -> None:
        self._batch_sampler = batch_sampler
        self._batches = batches
        self._numbers = numbers if workers else {}
        self._workers = workers
        self.iterator: _RestIterator | None = None

    @property
    def first_worker(self) -> int:
        """The one that the first batch of these would come from if none were left out."""
        return self._batches % max(1, self._workers)

    def whole(self) -> None:
        """From now on, all of them. A worker that has had no turn yet still goes on from its numbers."""
        self._batches, self._numbers = 0, {} if self.iterator is None else self.iterator.numbers

    def __iter__(self) -> _RestIterator:
        turns = itertools.cycle(range(self._workers))
        _consume(turns, self.first_worker)
        self.iterator = _RestIterator(iter(self._batch_sampler), self._batches, turns, {**self._numbers})
        return self.iterator

    def __len__(self) -> int:
        return max(0, len(self._batch_sampler) - self._batches)


class _RestIterator:
    """Skips at the first ``next``, or when told to: a sampler draws its seed then, after the loader drew its own."""

    def __init__(self, iterator: Iterator[Any], batches: int, turns: Iterator[int], numbers: dict[int, bytes]) -> None:
        self._iterator = iterator
        self._batches = batches
        self._turns = turns
        self.numbers = numbers
        """What workers go on from with their first task."""

    def skip(self) -> None:
        batches, self._batches = self._batches, 0
        _consume(self._iterator, batches)

    def __iter__(self) -> _RestIterator:
        return self

    def __next__(self) -> Any:
        self.skip()
        samples = next(self._iterator)
        numbers = self.numbers.pop(next(self._turns), b"") if self.numbers else b""
        return Task(numbers, samples) if numbers else samples


class _Rest(DataLoader[Any]):
    """Stands for a loader, over what is left of its batches; its workers keep their turns and their numbers."""

    def __init__(self, loader: DataLoader[Any], rest: _RestOfBatches) -> None:
        self.rest = rest
        in_worker = InWorker(loader, {}) if loader.num_workers else None
        super().__init__(
            loader.dataset,
            batch_sampler=rest,
            num_workers=loader.num_workers,
            collate_fn=in_worker.collate if in_worker else loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=in_worker.begin if in_worker else loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def _get_iterator(self) -> Any:
        return _InTurn(self) if self.num_workers else super()._get_iterator()


class _InTurn(_MultiProcessingDataLoaderIter):
    """Torch gives a pass's first batch to worker 0 and begins to go round there, each time that it begins one. Workers
    differ by their number: in their seed, and in what ``worker_init_fn`` makes of it.
    """

    def __init__(self, loader: _Rest) -> None:
        self._rest = loader.rest
        super().__init__(loader)

    @property  # type: ignore[override] # torch's is an attribute
    def _worker_queue_idx_cycle(self) -> Iterator[int]:
        return self._turns

    @_worker_queue_idx_cycle.setter
    def _worker_queue_idx_cycle(self, turns: Iterator[int]) -> None:
        _consume(turns, self._rest.first_worker)
        self._turns = turns


def _consume(iterator: Iterator[Any], count: int) -> None:
    next(itertools.islice(iterator, count, count), None)
