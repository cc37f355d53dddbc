"""gloo's threads have come to rest when all of them sleep, and none has been awake in between."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilient_train.frameworks.torch import gloo_at_rest as module
from resilient_train.frameworks.torch.gloo_at_rest import AtRest

LOOKS_S = 0.15
"""Several times as long as rest takes to be seen."""


@contextlib.contextmanager
def gloos(work: Callable[[threading.Event], None], name: str = module._COMPUTES) -> Iterator[None]:
    """A thread that has the name of one of gloo's."""
    ended, named = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        named.set()
        work(ended)

    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def comes_to_rest(at_rest: AtRest, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if at_rest():
            return True
        time.sleep(0.001)
    return False


def sleeps(ended: threading.Event) -> None:
    ended.wait()


def spins(ended: threading.Event) -> None:
    """Without the GIL: whoever waits for that sleeps."""
    while not ended.is_set():
        hashlib.pbkdf2_hmac("sha256", b"", b"", 30_000)


class WakesUp:
    """Each 5 ms, as far as the machine lets it: one that is busy may hold it longer than rest takes to be seen."""

    longest_s = 0.0

    def __call__(self, ended: threading.Event) -> None:
        over = False
        while not over:
            slept_s = time.monotonic()
            over = ended.wait(0.005)
            self.longest_s = max(self.longest_s, time.monotonic() - slept_s)


def test_all_sleep() -> None:
    with gloos(sleeps), gloos(WakesUp(), module._READS):
        assert comes_to_rest(AtRest(lambda: True), 60)


@pytest.mark.parametrize("name", [module._COMPUTES, module._READS])
def test_one_is_awake(name: str) -> None:
    with gloos(sleeps), gloos(spins, name):
        assert not comes_to_rest(AtRest(lambda: True), LOOKS_S)


def test_one_wakes_up_each_few_milliseconds() -> None:
    wakes = WakesUp()
    with gloos(sleeps), gloos(wakes):
        rested = comes_to_rest(AtRest(lambda: True), LOOKS_S)
    assert not rested or wakes.longest_s >= module._STILL_S / 2


def test_a_machine_that_stood_still_is_not_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: clock_s)
    monkeypatch.setattr(module, "_asleep", lambda: {"1": ("5", "0")})
    at_rest = AtRest(lambda: True)
    for _ in range(2):
        clock_s += 60
        assert not at_rest()
    looks = 0
    while not at_rest():
        clock_s += module._LOOK_S
        looks += 1
    assert looks >= 2


def test_more_may_come() -> None:
    with gloos(sleeps):
        assert not comes_to_rest(AtRest(lambda: False), LOOKS_S)


def test_rest_begins_when_the_last_one_sleeps() -> None:
    begun_s = time.monotonic()

    def later(ended: threading.Event) -> None:
        while time.monotonic() < begun_s + LOOKS_S:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 30_000)
        ended.wait()

    with gloos(later):
        assert comes_to_rest(AtRest(lambda: True), 60)
        assert time.monotonic() - begun_s >= LOOKS_S


def test_where_no_thread_has_such_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time is all that there is then."""
    monkeypatch.setattr(module, "_READS", "nobody")
    monkeypatch.setattr(module, "_COMPUTES", "nobody")
    begun_s = time.monotonic()
    assert comes_to_rest(AtRest(lambda: True), 60)
    assert time.monotonic() - begun_s >= module._UNKNOWN_S
