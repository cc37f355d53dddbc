"""The log of a tail as other ranks read it, also where it is too small."""

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from resilient_train._native import Board
from resilient_train.protocol.standing import APPLIED, COMPUTE, Phase, Standing
from resilient_train.session.peers import Peers
from resilient_train.state.arena import Arena

LOG_BYTES = 400
Pair = tuple[Peers, Peers]


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The log of rank 0, by itself and as rank 1 reads it."""
    board = Board.create(2)
    arenas = [Arena.create(64, getattr(request, "param", LOG_BYTES)) for _ in range(2)]

    def borrow(rank: int) -> int:
        return os.dup(arenas[rank].fd)

    def reserve(_bytes: int) -> int:
        raise AssertionError("nobody publishes here")

    yield tuple(Peers(board, rank, arena, borrow, reserve) for rank, arena in enumerate(arenas))  # type: ignore[misc]
    for arena in arenas:
        arena.close()


def another_process(of: Peers) -> Peers:
    """Takes the place of one that has died: the same board and memory, and nothing of what it knew."""

    def nobody(_: int) -> int:
        raise AssertionError

    return Peers(of._board, of.rank, Arena(os.dup(of._arena.fd)), nobody, nobody)


@pytest.mark.parametrize("phase", [APPLIED, COMPUTE])
def test_a_tail_and_a_window_begin_without_collectives(pair: Pair, phase: int) -> None:
    """Whoever reads COMPUTE reads no collectives of the tail with it: that would be a rank which trains on."""
    mine, _ = pair
    mine.enter_collective()
    assert mine.progress()[2] == 1
    mine.record(Standing(3, Phase.READY), 5)
    assert mine.progress() == (3, Phase.READY, 1, 0)
    mine.record(Standing(3, Phase(phase)), 5)
    assert mine.progress() == (3, phase, 0, 0)


def test_calls_and_a_result(pair: Pair) -> None:
    mine, theirs = pair
    mine.reset_log(3)
    assert mine.log(("world", 0), b"header", b"inputs")
    assert mine.log(("pair", 0), b"other", b"")
    mine.log_result(("pair", 0), b"result")
    first, second = (theirs.call(0, (name, 0), 3) for name in ("world", "pair"))
    assert first is not None
    assert (first.header, first.inputs, first.place, first.result) == (b"header", b"inputs", 0, None)
    assert second is not None
    assert (second.place, second.result) == (1, b"result")
    assert theirs.call(0, ("world", 1), 3) is None
    assert theirs.call(0, ("world", 0), 4) is None


def test_a_call_that_is_too_large_is_told_and_the_next_one_is_kept(pair: Pair) -> None:
    mine, theirs = pair
    mine.reset_log(1)
    assert not mine.log(("world", 0), b"header", bytes(LOG_BYTES))
    assert mine.log(("world", 1), b"header", b"small")
    large, small = (theirs.call(0, ("world", sequence), 1) for sequence in range(2))
    assert large is not None
    assert large.inputs is None
    assert small is not None
    assert (small.inputs, small.place) == (b"small", 1)


def test_results_take_no_room_from_calls(pair: Pair) -> None:
    mine, theirs = pair
    mine.reset_log(1)
    assert mine.log(("world", 0), b"header", bytes(200))
    mine.log_result(("world", 0), bytes(LOG_BYTES))
    mine.log_result(("world", 0), bytes(200))
    assert mine.log(("world", 1), b"header", bytes(100))
    call = theirs.call(0, ("world", 0), 1)
    assert call is not None
    assert call.result == bytes(200)


def test_many_calls_fill_the_log_and_all_others_are_known_to_be_missing(pair: Pair) -> None:
    """Nobody may take a call that was made for one that its rank died before."""
    mine, theirs = pair
    mine.reset_log(1)
    kept = [mine.log(("world", sequence), b"header", b"") for sequence in range(100)]
    assert kept.count(True) == kept.index(False) > 5
    calls = [theirs.call(0, ("world", sequence), 1) for sequence in range(101)]
    assert all(call is not None for call in calls)
    assert [call is not None and call.inputs is not None for call in calls[:100]] == kept


def test_a_log_of_no_size_keeps_nothing_and_says_so(pair: Pair) -> None:
    board, arena = Board.create(1), Arena.create(64, 0)

    def nobody(_: int) -> int:
        raise AssertionError

    peers = Peers(board, 0, arena, nobody, nobody)
    peers.reset_log(1)
    assert not peers.log(("world", 0), b"header", b"")
    call = peers.call(0, ("world", 0), 1)
    assert call is not None
    assert call.inputs is None


def test_a_new_tail_begins_anew(pair: Pair) -> None:
    mine, theirs = pair
    mine.reset_log(1)
    for sequence in range(100):
        mine.log(("world", sequence), b"header", b"")
    assert theirs.call(0, ("world", 99), 1) is not None
    mine.reset_log(2)
    assert theirs.call(0, ("world", 0), 2) is None
    assert mine.log(("world", 0), b"header", b"new")
    call = theirs.call(0, ("world", 0), 2)
    assert call is not None
    assert (call.inputs, call.place) == (b"new", 0)


def test_all_start_again_before_the_tail_in_which_they_died(pair: Pair) -> None:
    """Its log is of another attempt, with other inputs."""
    dead, theirs = pair
    dead.reset_log(3)
    assert dead.log(("world", 0), b"header", b"inputs of the dead attempt")
    dead.completed(1)
    mine = another_process(dead)
    mine.reset_log(3)
    assert mine.completed_of(0) == 0
    assert theirs.call(0, ("world", 0), 3) is None
    assert mine.log(("world", 0), b"header", b"inputs")
    call = theirs.call(0, ("world", 0), 3)
    assert call is not None
    assert (call.inputs, call.place) == (b"inputs", 0)


def test_who_takes_a_dead_ones_place_leaves_its_log_until_it_has_a_tail_of_its_own(pair: Pair) -> None:
    dead, theirs = pair
    dead.reset_log(3)
    assert dead.log(("world", 0), b"header", b"inputs")
    dead.completed(1)
    mine = another_process(dead)
    assert mine.completed_of(0) == 1
    assert theirs.call(0, ("world", 0), 3) is not None
    mine.reset_log(4)
    assert theirs.call(0, ("world", 0), 3) is None


def effort(act: Callable[[], object]) -> tuple[int, int]:
    """How many steps of Python it takes, and how much memory at once: a copy is seen too."""
    steps = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    gc.disable()  # or a collection that falls in here counts the finalizers of other tests
    sys.settrace(count)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    tracemalloc.start()
    try:
        act()
        return steps, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pair", [1 << 20], indirect=True)
def test_a_call_costs_the_same_however_many_were_logged_before(pair: Pair) -> None:
    """For who logs it, who reads it as it comes, and who asks for one of long ago."""
    mine, theirs = pair
    mine.reset_log(1)
    logged = 0

    def log() -> None:
        nonlocal logged
        assert mine.log(("world", logged), b"header", b"inputs")
        logged += 1

    def read_newest() -> None:
        assert theirs.call(0, ("world", logged - 1), 1) is not None

    def log_and_read() -> None:
        log()
        read_newest()

    def read_first() -> None:
        assert theirs.call(0, ("world", 0), 1) is not None

    effort(log)  # Python 3.12 counts the first time only what it comes to behind it
    efforts = []
    for entries in (100, 10_000):
        while logged < entries:
            log()
        read_newest()
        efforts.append([effort(act) for act in (log, read_newest, log_and_read, read_first)])
    few, many = efforts
    assert [steps for steps, _ in many] == [steps for steps, _ in few]
    assert all(much <= little + 1024 for (_, much), (_, little) in zip(many, few, strict=True)), efforts
