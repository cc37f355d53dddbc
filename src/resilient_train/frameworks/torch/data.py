"""A loader from its n-th batch on, without loading what comes before it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


def fast_forward(loader: Any, batches: int) -> Iterator[Any]:
    """An iterator over ``loader`` that starts at batch ``batches``.

    Must be called with the random state that the epoch began with: loader and sampler draw their seeds in here, in the
    order in which they draw them at the start of an epoch. Nothing else is drawn.
    """
    if batches and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        rest = _Rest(loader.batch_sampler, batches)
        iterator: Iterator[Any] = iter(_skipping(loader, rest))
        if rest.iterator is not None:
            rest.iterator.skip()
        return iterator
    iterator = iter(loader)
    _consume(iterator, batches)
    return iterator


class _Rest:
    """A batch sampler without its first batches: what they name is never loaded."""

    def __init__(self, batch_sampler: Any, batches: int) -> None:
        self._batch_sampler = batch_sampler
        self._batches = batches
        self.iterator: _RestIterator | None = None

    def __iter__(self) -> _RestIterator:
        self.iterator = _RestIterator(iter(self._batch_sampler), self._batches)
        return self.iterator

    def __len__(self) -> int:
        return max(0, len(self._batch_sampler) - self._batches)


class _RestIterator:
    """Skips at the first ``next``, or when told to: a sampler draws its seed then, after the loader drew its own."""

    def __init__(self, iterator: Iterator[Any], batches: int) -> None:
        self._iterator = iterator
        self._batches = batches

    def skip(self) -> None:
        batches, self._batches = self._batches, 0
        _consume(self._iterator, batches)

    def __iter__(self) -> _RestIterator:
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)


def _skipping(loader: DataLoader[Any], rest: _Rest) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_sampler=rest,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )


def _consume(iterator: Iterator[Any], count: int) -> None:
    next(itertools.islice(iterator, count, count), None)
