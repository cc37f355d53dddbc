"""gloo's threads have come to rest when all of them sleep, and none has been awake in between."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilient_train.frameworks.torch import at_rest as module
from resilient_train.frameworks.torch.at_rest import AtRest

LOOKS_S = 0.15
"""Several times as long as rest takes to be seen."""


@contextlib.contextmanager
def gloos(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """A thread that has the name of one of gloo's."""
    ended, named = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
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
    while not ended.is_set():
        pass


def wakes_up(ended: threading.Event) -> None:
    while not ended.wait(0.005):
        pass


def test_one_that_sleeps() -> None:
    with gloos(sleeps):
        assert comes_to_rest(AtRest(lambda: True), 60)


@pytest.mark.parametrize("work", [spins, wakes_up])
def test_one_that_is_awake_now_and_then(work: Callable[[threading.Event], None]) -> None:
    with gloos(sleeps), gloos(work):
        assert not comes_to_rest(AtRest(lambda: True), LOOKS_S)


def test_more_may_come() -> None:
    with gloos(sleeps):
        assert not comes_to_rest(AtRest(lambda: False), LOOKS_S)


def test_rest_begins_when_the_last_one_sleeps() -> None:
    begun_s = time.monotonic()

    def later(ended: threading.Event) -> None:
        while time.monotonic() < begun_s + LOOKS_S:
            pass
        ended.wait()

    with gloos(later):
        assert comes_to_rest(AtRest(lambda: True), 60)
        assert time.monotonic() - begun_s >= LOOKS_S + module._STILL_S


def test_where_no_thread_has_such_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time is all that there is then."""
    monkeypatch.setattr(module, "_THREADS", frozenset(("nobody",)))
    begun_s = time.monotonic()
    assert comes_to_rest(AtRest(lambda: True), 60)
    assert time.monotonic() - begun_s >= module._UNKNOWN_S
