"""The random numbers of a rank: what was captured, put back anywhere, gives the numbers that would have followed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from resilient_train.frameworks.torch.kept import generators  # noqa: E402 - only where torch is
from resilient_train.frameworks.torch.kept.generators import random_state, restore_random_state  # noqa: E402 - only where torch is

# The global generators are what is under test.
# ruff: noqa: NPY002


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


DRAWS: list[Callable[[], object]] = [
    random.random,
    lambda: random.gauss(0, 1),
    np.random.rand,
    np.random.randn,
    lambda: torch.rand(3),
    lambda: torch.randn(1),
    lambda: torch.randn(1, dtype=torch.float64),
]


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def test_numbers_go_on_where_they_were() -> None:
    seed(1)
    draw()
    state = random_state()
    expected = [draw() for _ in range(3)]
    seed(2)
    restore_random_state(state)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("which", range(len(DRAWS)))
def test_each_draw_is_seen(which: int) -> None:
    """Twice, because of the second normal number that Python and NumPy keep from the first draw."""
    seed(3)
    states = [random_state()]
    for _ in range(4):
        DRAWS[which]()
        states.append(random_state())
    assert len(set(states)) == 5


def test_nothing_drawn_is_the_same_state() -> None:
    seed(4)
    assert random_state() == random_state()


def test_a_kept_normal_number_that_is_used_up_is_seen() -> None:
    """NumPy's words stand still when the kept number is handed out: only its flag tells."""
    seed(5)
    np.random.randn()
    kept = random_state()
    expected = np.random.randn()
    used = random_state()
    assert kept != used
    restore_random_state(kept)
    assert np.random.randn() == expected
    assert random_state() == used


def test_another_kind_of_numpy_generator() -> None:
    ours = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.MT19937(7))
        before = random_state()
        np.random.rand()
        assert random_state() != before
    finally:
        np.random.set_bit_generator(ours)


def test_what_lies_in_memory_is_what_python_says() -> None:
    assert generators._lies_behind_its_head(), "this CPython has its generator elsewhere: it is asked, which is slower"
    for number in range(3):
        seed(number)
        random.gauss(0, 1)
        for _ in range(700):  # through the words once, and a little further
            assert generators._python_state() == generators._python_state_asked()
            random.random()


def test_torchs_generator_is_found_in_memory() -> None:
    assert generators._torch_span(torch.default_generator), "this torch has its generator elsewhere: asked, and slower"


def test_a_torch_that_has_it_elsewhere_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_torch_span", lambda _: None)
    monkeypatch.setattr(generators, "_torch_held", generators._Held(None, None))
    seed(9)
    state = random_state()
    torch.rand(1)
    moved = random_state()
    assert moved != state
    assert random_state() == moved


def test_a_python_that_has_it_elsewhere_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seed(8)
    random.gauss(0, 1)
    state = random_state()
    monkeypatch.setattr(generators, "_lies_behind_its_head", lambda: False)
    assert random_state() == state
    random.random()
    assert random_state() != state


def test_a_glance_is_cheaper_than_asking() -> None:
    """Three times a step: the reason for looking at NumPy's words. In the same process, by ratio."""
    seed(6)
    random_state()

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(101):
            begin = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begin)
        return sorted(times)[50]

    asking = median(lambda: np.random.get_state(legacy=True))
    assert median(random_state) < asking
