"""SIGCHLD while ranks recover: its handler runs when they go on, once, and one that is set around ours hands on."""

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from resilient_train.session.held_signal import HeldChildSignal

HEARD: list[int] = []


def handler(number: int, _: FrameType | None) -> None:
    HEARD.append(number)


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    was = signal.signal(signal.SIGCHLD, handler)
    HEARD.clear()
    yield
    signal.signal(signal.SIGCHLD, was)


def test_it_is_heard_when_all_go_on() -> None:
    held = HeldChildSignal()
    held.hold()
    held.hold()
    signal.raise_signal(signal.SIGCHLD)
    signal.raise_signal(signal.SIGCHLD)
    assert not HEARD
    held.let()
    assert len(HEARD) == 1, "as the kernel has it: that there were several nobody knows"
    held.let()
    assert len(HEARD) == 1
    assert signal.getsignal(signal.SIGCHLD) is handler
    held.hold()
    held.let()
    assert len(HEARD) == 1, "there was none"


def test_what_it_raises_leaves() -> None:
    def raises(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("a worker is gone")

    signal.signal(signal.SIGCHLD, raises)
    held = HeldChildSignal()
    held.hold()
    signal.raise_signal(signal.SIGCHLD)
    with pytest.raises(RuntimeError, match="a worker is gone"):
        held.let()
    assert signal.getsignal(signal.SIGCHLD) is raises


def test_one_that_was_set_meanwhile_stays_and_hands_on() -> None:
    """torch sets its own when a loader first has workers, and calls the one that was there behind it."""
    held, outer = HeldChildSignal(), list[int]()
    held.hold()
    ours = signal.getsignal(signal.SIGCHLD)
    assert callable(ours)

    def around(number: int, frame: FrameType | None) -> None:
        outer.append(number)
        ours(number, frame)

    signal.signal(signal.SIGCHLD, around)
    signal.raise_signal(signal.SIGCHLD)
    assert (len(outer), len(HEARD)) == (1, 0)
    held.let()
    assert signal.getsignal(signal.SIGCHLD) is around
    assert (len(outer), len(HEARD)) == (2, 1)
    signal.raise_signal(signal.SIGCHLD)
    assert (len(outer), len(HEARD)) == (3, 2)


def test_one_that_is_set_around_ours_each_time() -> None:
    held = HeldChildSignal()
    for _ in range(3):
        held.hold()
        ours = signal.getsignal(signal.SIGCHLD)
        assert callable(ours)
        signal.signal(signal.SIGCHLD, lambda number, frame, ours=ours: ours(number, frame))
        held.let()
    signal.raise_signal(signal.SIGCHLD)
    assert len(HEARD) == 1


def test_an_end_says_nothing() -> None:
    held = HeldChildSignal()
    held.hold()
    signal.raise_signal(signal.SIGCHLD)
    held.end()
    held.let()
    assert not HEARD
    assert signal.getsignal(signal.SIGCHLD) is handler


@pytest.mark.parametrize("kind", [signal.SIG_DFL, signal.SIG_IGN])
def test_what_is_no_function_stays(kind: signal.Handlers) -> None:
    signal.signal(signal.SIGCHLD, kind)
    held = HeldChildSignal()
    held.hold()
    assert signal.getsignal(signal.SIGCHLD) is kind
    held.let()


def test_another_thread_holds_nothing() -> None:
    held = HeldChildSignal()
    thread = threading.Thread(target=held.hold)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGCHLD) is handler
