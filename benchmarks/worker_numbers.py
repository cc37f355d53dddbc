"""What it costs that a loader's workers tell what they draw from: in a worker, and in the training process.

python benchmarks/worker_numbers.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from resilient_train.frameworks.torch import data
from resilient_train.frameworks.torch.worker_numbers import InWorker
from resilient_train.session.redo.loader import Cursor

BATCHES, REPETITIONS = 1000, 20


class Samples(Dataset[torch.Tensor]):
    def __init__(self, *, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.rand(3) if self.draws else torch.zeros(3)


def us_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(BATCHES):
        call()
    return (time.perf_counter() - start) / BATCHES * 1e6


def in_worker(*, draws: bool) -> float:
    """By turns with torch's own collate function, so the difference is ours."""
    samples = Samples(draws=draws)
    loader = DataLoader(samples, batch_size=4)
    ours = InWorker(loader, {})
    ours.begin(0)
    differences = [
        us_of(lambda: ours.collate([samples[each] for each in range(4)]))
        - us_of(lambda: loader.collate_fn([samples[each] for each in range(4)]))
        for _ in range(REPETITIONS)
    ]
    return statistics.median(differences)


def position(workers: int, *, draws: bool) -> tuple[float, int]:
    """Of the place in the data, as each step publishes it."""
    cursor = Cursor(DataLoader(Samples(draws=draws), batch_size=4, num_workers=workers), data)
    cursor.looks = True
    took: list[float] = []
    for _ in range(REPETITIONS * 5):
        cursor.next()
        start = time.perf_counter()
        place: Any = cursor.position()
        took.append((time.perf_counter() - start) * 1e6)
    return statistics.median(took), len(place.workers)


def main() -> None:
    for draws in (False, True):
        print(f"in a worker, {'drawing' if draws else 'not drawing'}: {in_worker(draws=draws):5.1f} us a batch")
    for workers in (0, 2, 8):
        for draws in (False, True):
            us, size = position(workers, draws=draws)
            print(f"{workers} workers, {'drawing' if draws else 'not drawing'}: position {us:5.1f} us, {size} bytes")


if __name__ == "__main__":
    main()
