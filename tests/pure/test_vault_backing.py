"""The pages of a rank's slots are made in a thread, which stops when it is asked to and tells what went wrong."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest

from resilient_train.errors import MemoryLimitError
from resilient_train.state.vault.backing import Backing


class Pair:
    """``make`` stands for the kernel's work on one piece."""

    rank = 3

    def __init__(self, make: Callable[[], None], pieces: int = 1) -> None:
        self.make = make
        self.pieces = pieces
        self.made = 0

    def prefault(self, going: Callable[[], bool]) -> None:
        while self.made < self.pieces and going():
            self.make()
            self.made += 1


def test_all_pages_are_made() -> None:
    pair = Pair(lambda: None, pieces=5)
    Backing(pair).wait()  # type: ignore[arg-type]
    assert pair.made == 5


def test_no_pages() -> None:
    def refuse() -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with pytest.raises(MemoryLimitError, match=r"rank 3: the kernel gave no pages .* no memory"):
        Backing(Pair(refuse)).wait()  # type: ignore[arg-type]


def test_closed_in_the_middle() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def make() -> None:
        begun.set()
        assert goes_on.wait(30)

    pair = Pair(make, pieces=1000)
    backing = Backing(pair)  # type: ignore[arg-type]
    assert begun.wait(30)
    threading.Timer(0.01, goes_on.set).start()
    backing._closing = True  # before the first piece is over, as ``close`` would have it
    backing.close()
    assert pair.made == 1
