"""gloo's threads have come to rest when all of them sleep, and none has been awake in between."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilient_train.frameworks.torch.communication import gloo_at_rest as module
from resilient_train.frameworks.torch.communication.gloo_at_rest import AtRest

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
        assert comes_to_rest(AtRest(tuple), 60)


@pytest.mark.parametrize("name", [module._COMPUTES, module._READS])
def test_one_is_awake(name: str) -> None:
    with gloos(sleeps), gloos(spins, name):
        assert not comes_to_rest(AtRest(tuple), LOOKS_S)


def test_one_wakes_up_each_few_milliseconds() -> None:
    wakes = WakesUp()
    with gloos(sleeps), gloos(wakes):
        rested = comes_to_rest(AtRest(tuple), LOOKS_S)
    assert not rested or wakes.longest_s >= module._STILL_S / 2


ASLEEP = module._Threads({"1": ("5", "0")}, {}, some=True)


class Clock:
    """Of the module, while this one is looked at: the threads of gloo are what the test says they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.threads: module._Threads | None = ASLEEP
        self.runs = False
        """The thread that reads does not sleep."""
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(module, "_look", self._look)

    def _look(self, _left: object) -> module._Threads | None:
        return ASLEEP._replace(reads={"2": 7 + self.now_s}) if self.runs else self.threads

    def until(self, at_rest: AtRest) -> float:
        """Seconds; looks at the pace of the module."""
        begun_s = self.now_s
        while not at_rest():
            self.now_s += module._LOOK_S
        return self.now_s - begun_s


def test_a_machine_that_stood_still_is_not_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    at_rest = AtRest(tuple)
    for _ in range(2):
        clock.now_s += 60
        assert not at_rest()
    assert clock.until(at_rest) >= 2 * module._LOOK_S


def test_nor_has_anybody_been_awake_for_long_enough_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever could not run meanwhile will write when it can."""
    clock = Clock(monkeypatch)
    clock.threads = None
    at_rest = AtRest(tuple)
    clock.now_s += 3600
    assert clock.until(at_rest) >= 0.9 * module._AWAKE_S


def test_who_is_awake_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another group of the user's, say, that goes on all the time."""
    clock = Clock(monkeypatch)
    clock.threads = None
    assert clock.until(AtRest(tuple)) == pytest.approx(module._AWAKE_S, rel=0.05)


def test_what_nobody_reads_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for unread in (None, (0, 7)):
        assert clock.until(AtRest(lambda told=unread: told)) == pytest.approx(module._UNREAD_S, rel=0.05)


def test_who_is_told_again_and_again_of_what_it_does_not_read_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel wakes a thread of gloo's for what no collective takes any more: it never sleeps."""
    clock = Clock(monkeypatch)
    clock.runs = True
    assert clock.until(AtRest(lambda: (0, 7))) < 0.1
    assert clock.until(AtRest(lambda: (0, 0))) == pytest.approx(module._UNREAD_S, rel=0.1)
    left = iter(range(10**6, 0, -1))
    assert clock.until(AtRest(lambda: (next(left),))) == pytest.approx(module._AWAKE_S, rel=0.05), "it reads"


def test_who_could_not_run_has_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.threads = ASLEEP._replace(reads={"2": 7.0})
    assert clock.until(AtRest(lambda: (0, 7))) == pytest.approx(module._AWAKE_S, rel=0.05)


def test_a_thread_that_runs_is_seen_to_run() -> None:
    with gloos(spins, module._READS):
        assert comes_to_rest(AtRest(lambda: (7,)), 60)


def test_rest_begins_when_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has read may not have woken the thread that computes with it."""
    clock = Clock(monkeypatch)
    read_s = module._UNREAD_S / 2
    assert clock.until(AtRest(lambda: (int(clock.now_s < read_s),))) >= read_s + module._STILL_S


def test_more_may_come() -> None:
    with gloos(sleeps):
        assert not comes_to_rest(AtRest(lambda: None), LOOKS_S)


def test_rest_begins_when_the_last_one_sleeps() -> None:
    begun_s = time.monotonic()

    def later(ended: threading.Event) -> None:
        while time.monotonic() < begun_s + LOOKS_S:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 30_000)
        ended.wait()

    with gloos(later):
        assert comes_to_rest(AtRest(tuple), 60)
        assert time.monotonic() - begun_s >= LOOKS_S


def test_where_no_thread_has_such_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time is all that there is then."""
    monkeypatch.setattr(module, "_READS", "nobody")
    monkeypatch.setattr(module, "_COMPUTES", "nobody")
    begun_s = time.monotonic()
    assert comes_to_rest(AtRest(tuple), 60)
    assert time.monotonic() - begun_s >= module._UNKNOWN_S


def test_threads_of_groups_that_were_left_before_do_not_count() -> None:
    before = module.gloos_threads()
    with gloos(spins):
        left = {number: began for number, began in module.gloos_threads().items() if number not in before}
        assert len(left) == 1
        assert not comes_to_rest(AtRest(lambda: ()), LOOKS_S)
        with gloos(sleeps):
            assert comes_to_rest(AtRest(lambda: (), left), 10)
        (number,) = left
        assert not comes_to_rest(AtRest(lambda: (), {number: "0"}), LOOKS_S), "another thread has its number now"


@pytest.mark.torch
def test_who_waits_for_gloo_and_then_copies_may_be_awake() -> None:
    """torch has the result of a reduce-scatter copied by who waits for it."""
    pytest.importorskip("torch")
    from resilient_train.frameworks.torch.communication.guarded_works import InThread

    class Slow:
        def __init__(self) -> None:
            self.begun, self.ended = threading.Event(), threading.Event()

        def wait(self) -> None:
            self.begun.set()
            spins(self.ended)

    work = Slow()
    with gloos(sleeps):
        future = InThread(work).get_future()
        work.begun.wait()
        assert not comes_to_rest(AtRest(tuple), LOOKS_S)
        work.ended.set()
        future.wait()
        assert comes_to_rest(AtRest(tuple), 60)
