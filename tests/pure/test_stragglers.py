"""Who has become slower, since when and by how much; who is named for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_train.protocol.level_shift import LEARN_MIN, LevelShift
from resilient_train.protocol.stragglers import AsBefore, Slower, Stragglers, _against_peers

AT = 150
USUAL_MS = 50.0


class Job:
    """Ranks that compute for 50 ms in each window, with noise; ``factor(rank, number)`` times as long."""

    def __init__(self, ranks: int, noise: float = 0.05, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._noise = noise
        self._ranks = ranks
        self._number = 0
        self.stragglers = Stragglers(ranks)
        self.told: list[tuple[int, Slower | AsBefore]] = []

    def windows(self, count: int, factor: Callable[[int, int], float] = lambda _rank, _number: 1.0) -> None:
        for number in range(self._number, self._number + count):
            times = [
                USUAL_MS * 1e6 * max(0.1, self._chance.gauss(1, self._noise)) * factor(rank, number)
                for rank in range(self._ranks)
            ]
            self.told += [(number, each) for each in self.stragglers.observe(number, list(map(int, times)))]
        self._number += count


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [1.2, 1.4, 2.0])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_rank_becomes_slower(ranks: int, factor: float, seed: int) -> None:
    job, slow = Job(ranks, seed=seed), seed % ranks
    job.windows(AT + 50, lambda rank, number: factor if rank == slow and number >= AT else 1.0)
    ((number, found),) = job.told
    assert isinstance(found, Slower)
    assert found.rank == slow
    assert AT <= number < AT + 50
    assert abs(found.since - AT) <= 5
    assert found.ratio == pytest.approx(factor, rel=0.1)
    assert found.before_ms == pytest.approx(USUAL_MS, rel=0.1)
    assert found.compute_ms == pytest.approx(USUAL_MS * factor, rel=0.1)
    assert job.stragglers.slower == {slow: found}


NOBODY: dict[str, Callable[[int, int], float]] = {
    "nothing happens": lambda _rank, _number: 1.0,
    "all are slower": lambda _rank, number: 1.7 if number >= AT else 1.0,
    "all are slower, one a bit more": lambda rank, number: (2.0 if rank else 2.3) if number >= AT else 1.0,
    "one is faster": lambda rank, number: 0.6 if rank == 0 and number >= AT else 1.0,
    "one always has more to do": lambda rank, _number: 3.0 if rank == 0 else 1.0,
    "rank 0 writes a log": lambda rank, number: 2.0 if rank == 0 and number % 10 == 0 else 1.0,
    "one is late now and then": lambda rank, number: 100.0 if (number * 7 + rank) % 53 == 0 else 1.0,
    "a short while": lambda rank, number: 5.0 if rank == 0 and AT <= number < AT + 12 else 1.0,
    "by 5 %": lambda rank, number: 1.05 if rank == 0 and number >= AT else 1.0,
}


@pytest.mark.parametrize("story", NOBODY)
@pytest.mark.parametrize("ranks", [2, 5])
def test_nobody_is_named(ranks: int, story: str) -> None:
    job = Job(ranks, noise=0.03)
    job.windows(600, NOBODY[story])
    assert job.told == []


def test_what_is_uneven_is_known() -> None:
    job = Job(3)
    job.windows(LEARN_MIN - 1, NOBODY["one always has more to do"])
    assert job.stragglers.usual() == {}
    job.windows(100, NOBODY["one always has more to do"])
    usual = job.stragglers.usual()
    assert usual[0].ratio == pytest.approx(3, rel=0.1)
    assert usual[1].ratio == pytest.approx(3**-0.5, rel=0.1), "the median of two is between them"
    assert usual[0].compute_ms == pytest.approx(3 * USUAL_MS, rel=0.1)


def test_slower_again_and_then_as_before() -> None:
    def factor(rank: int, number: int) -> float:
        if rank != 1 or not AT <= number < 3 * AT:
            return 1.0
        return 1.5 if number < 2 * AT else 3.0

    job = Job(2)
    job.windows(4 * AT, factor)
    first, second, over = (found for _, found in job.told)
    assert isinstance(first, Slower)
    assert isinstance(second, Slower)
    assert (first.ratio, second.ratio) == (pytest.approx(1.5, rel=0.1), pytest.approx(3.0, rel=0.1))
    assert second.before_ms == first.before_ms, "as long as it had taken when nothing was wrong"
    assert isinstance(over, AsBefore)
    assert over.slower == second
    assert [abs(each.since - at) <= 5 for each, at in zip((first, second, over), (AT, 2 * AT, 3 * AT), strict=True)]
    assert job.stragglers.slower == {}


def test_better_but_not_well() -> None:
    job = Job(2)
    job.windows(AT)
    job.windows(AT, lambda rank, _: 3.0 if rank == 0 else 1.0)
    job.windows(AT, lambda rank, _: 1.5 if rank == 0 else 1.0)
    assert len(job.told) == 1
    assert job.stragglers.slower[0].ratio == pytest.approx(1.5, rel=0.1)


def test_short_windows_are_taken_together() -> None:
    """A core that is somebody else's for a tenth of a second makes a hundred windows slower, and nobody is named."""
    chance, stragglers, told = random.Random(1), Stragglers(2), []
    for number in range(8000):
        burst = 4 if number % 1000 < 100 or number >= 5000 else 1
        times = [int(1e6 * chance.gauss(1, 0.05)), int(1e6 * burst * chance.gauss(1, 0.05))]
        told += stragglers.observe(number, times)
    (found,) = told
    assert isinstance(found, Slower)
    assert (found.rank, found.ratio) == (1, pytest.approx(4, rel=0.1))
    assert 4960 <= found.since <= 5010
    assert (found.before_ms, found.compute_ms) == (pytest.approx(1, rel=0.1), pytest.approx(4, rel=0.1))


def test_one_rank_has_no_peers() -> None:
    job = Job(1)
    job.windows(400, lambda _, number: 2.0 if number >= AT else 1.0)
    assert job.told == []
    assert job.stragglers.usual() == {}


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_each_against_the_median_of_the_others(logs: list[float]) -> None:
    others = [median(logs[:rank] + logs[rank + 1 :]) for rank in range(len(logs))]
    expected = [value - middle for value, middle in zip(logs, others, strict=True)]
    assert _against_peers(logs) == pytest.approx(expected)


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(0, 2**32), st.permutations(range(6)))
def test_ranks_are_treated_alike(ranks: int, seed: int, order: list[int]) -> None:
    order = [rank for rank in order if rank < ranks]
    chance = random.Random(seed)
    windows = [[int(5e7 * chance.lognormvariate(0, 0.1)) for _ in range(ranks)] for _ in range(200)]
    slow = chance.randrange(ranks)
    told: list[set[tuple[int, int]]] = []
    for names in (list(range(ranks)), order):
        stragglers, found = Stragglers(ranks), set()
        for number, times in enumerate(windows):
            mixed = [times[name] * (1.5 if name == slow and number >= 120 else 1) for name in names]
            found |= {(names[each.rank], each.since) for each in stragglers.observe(number, list(map(int, mixed)))}
        told.append(found)
    assert told[0] == told[1]


@settings(max_examples=50)
@given(st.lists(st.floats(-100, 100), max_size=300), st.floats(-100, 100))
def test_only_the_level_counts(values: list[float], more: float) -> None:
    here, there = LevelShift(), LevelShift()
    found = [here.observe(value) for value in values]
    moved = [there.observe(value + more) for value in values]
    assert [each and each.age for each in found] == [each and each.age for each in moved]
    assert not any(found[:LEARN_MIN]), "nothing is known yet"


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.07, 0.14])
def test_noise_alone_is_no_shift(noise: float) -> None:
    chance, series = random.Random(noise), LevelShift()
    assert not any(series.observe(chance.gauss(0, noise)) for _ in range(20_000))
