"""The watchdog thread inside one process: beats, sockets, signals, fork."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilient_train._native import Board, DeathWatch, Watchdog

BEAT_MS = 10


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(1)
    yield board
    board.close()


@pytest.fixture
def signals() -> Iterator[list[int]]:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: received.append(number))
    yield received
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def watchdog(board: Board, signals: list[int]) -> Iterator[Watchdog]:
    del signals  # only so that the handler is there before the first signal, and longer than the last
    watchdog = Watchdog(board, 0, beat_ms=BEAT_MS, grace_ms=2, signal_number=signal.SIGUSR1)
    watchdog.start(0)
    yield watchdog
    watchdog.stop()


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def let_it_beat(board: Board, beats: int = 4) -> None:
    """Wait until the thread has been round its loop that often: what it would have done, it has done."""
    target = board.beats(0) + beats
    eventually(lambda: board.beats(0) >= target)


def stop_and_wait(board: Board, generation: int) -> None:
    board.raise_stop(generation)
    eventually(lambda: board.stopped_generation(0) == generation)


def guarded(*sockets: socket.socket) -> list[tuple[int, int]]:
    return [(each.fileno(), os.fstat(each.fileno()).st_ino) for each in sockets]


def is_shut(mine: socket.socket) -> bool:
    """End of file on this side; writing still works (see watchdog.cpp for why)."""
    mine.setblocking(False)
    try:
        return mine.recv(1) == b""
    except BlockingIOError:
        return False


def thread_names() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def test_thread_beats_has_a_name_and_takes_no_signals(board: Board, watchdog: Watchdog) -> None:
    del watchdog
    let_it_beat(board)
    for path in Path("/proc/self/task").glob("*/comm"):
        if path.read_text().strip() == "rt-watchdog":
            status = dict(line.split(":\t") for line in (path.parent / "status").read_text().splitlines())
            blocked = int(status["SigBlk"], 16)
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                assert blocked >> (number - 1) & 1
            return
    pytest.fail(f"no thread named rt-watchdog in {thread_names()}")


def test_main_thread_keeps_its_signal_mask(watchdog: Watchdog) -> None:
    del watchdog
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_stop_is_idempotent_and_start_works_again(board: Board, watchdog: Watchdog) -> None:
    with pytest.raises(RuntimeError):
        watchdog.start(0)
    watchdog.stop()
    watchdog.stop()
    assert "rt-watchdog" not in thread_names()
    beats = board.beats(0)
    watchdog.start(0)
    eventually(lambda: board.beats(0) > beats)


def test_stop_does_not_wait_for_a_beat(board: Board) -> None:
    slow = Watchdog(board, 0, beat_ms=60_000, signal_number=signal.SIGUSR1)
    slow.start(0)
    start = time.monotonic()
    slow.stop()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("bad", [{"beat_ms": 0}, {"grace_ms": -1}, {"signal_number": 0}, {"signal_number": 65}])
def test_bad_options(board: Board, bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Watchdog(board, 0, **({"signal_number": 10} | bad))
    with pytest.raises(IndexError):
        Watchdog(board, 1, signal_number=10)


def test_stop_shuts_guarded_sockets_only(board: Board, watchdog: Watchdog) -> None:
    mine, peer = socket.socketpair()
    spared, spared_peer = socket.socketpair()
    with mine, peer, spared, spared_peer:
        watchdog.guard_sockets(guarded(mine))
        stop_and_wait(board, 1)
        assert is_shut(mine)
        assert not is_shut(spared)


def test_older_stop_is_no_stop(board: Board) -> None:
    board.raise_stop(3)
    watchdog = Watchdog(board, 0, beat_ms=BEAT_MS, signal_number=signal.SIGUSR1)
    mine, peer = socket.socketpair()
    with mine, peer:
        watchdog.guard_sockets(guarded(mine))
        watchdog.start(3)
        let_it_beat(board)
        assert not is_shut(mine)
        assert board.stopped_generation(0) == 0
        stop_and_wait(board, 4)
        assert is_shut(mine)
    watchdog.stop()


def test_stop_pending_at_start_is_handled(board: Board) -> None:
    board.raise_stop(3)
    watchdog = Watchdog(board, 0, beat_ms=BEAT_MS, signal_number=signal.SIGUSR1)
    mine, peer = socket.socketpair()
    with mine, peer:
        watchdog.guard_sockets(guarded(mine))
        watchdog.start(2)
        eventually(lambda: board.stopped_generation(0) == 3)
        assert is_shut(mine)
    watchdog.stop()


def test_new_list_belongs_to_the_newer_stop(board: Board, watchdog: Watchdog) -> None:
    stop_and_wait(board, 1)
    mine, peer = socket.socketpair()
    with mine, peer:
        watchdog.guard_sockets(guarded(mine))
        let_it_beat(board)
        assert not is_shut(mine)
        stop_and_wait(board, 2)
        assert is_shut(mine)


def test_listening_socket_is_never_shut(board: Board, watchdog: Watchdog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        watchdog.guard_sockets(guarded(server))
        stop_and_wait(board, 1)
        with socket.create_connection(server.getsockname(), timeout=10):
            server.settimeout(10)
            server.accept()[0].close()


def test_reused_descriptor_is_not_shut(board: Board, watchdog: Watchdog) -> None:
    old, old_peer = socket.socketpair()
    new, new_peer = socket.socketpair()
    with new, new_peer, old_peer:
        number, inode = guarded(old)[0]
        old.close()
        os.dup2(new.fileno(), number)
        try:
            watchdog.guard_sockets([(number, inode), (0, os.fstat(0).st_ino), (-1, 1), (999_999, 1)])
            stop_and_wait(board, 1)
            assert not is_shut(new)
        finally:
            os.close(number)


def test_a_thousand_sockets(board: Board, watchdog: Watchdog) -> None:
    pairs = [socket.socketpair() for _ in range(400)]
    try:
        watchdog.guard_sockets(guarded(*(pair[0] for pair in pairs)))
        stop_and_wait(board, 1)
        assert all(is_shut(pair[0]) for pair in pairs)
    finally:
        for pair in pairs:
            pair[0].close()
            pair[1].close()


def test_signal_only_when_armed(board: Board, watchdog: Watchdog, signals: list[int]) -> None:
    assert not watchdog.armed
    stop_and_wait(board, 1)
    let_it_beat(board)
    assert signals == []
    watchdog.arm(1)  # this stop is known to whoever arms
    assert watchdog.armed
    let_it_beat(board)
    assert signals == []
    watchdog.arm(0)
    eventually(lambda: len(signals) >= 2)  # again, until acknowledged
    watchdog.disarm()
    seen = len(signals)
    let_it_beat(board, beats=30)
    assert len(signals) == seen


def test_acknowledge_ends_the_signals(board: Board, watchdog: Watchdog, signals: list[int]) -> None:
    watchdog.arm(0)
    stop_and_wait(board, 1)
    eventually(lambda: signals)
    watchdog.acknowledge(1)
    seen = len(signals)
    let_it_beat(board, beats=30)
    assert len(signals) == seen
    stop_and_wait(board, 2)  # a second fault while the first is being repaired
    eventually(lambda: len(signals) > seen)


def test_forked_child_can_do_no_harm(board: Board, watchdog: Watchdog) -> None:
    watchdog.arm(0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            watchdog.stop()
            watchdog.disarm()
            watchdog.arm(0)
            watchdog.guard_sockets([(0, 1)])
            watchdog.acknowledge(1)
            try:
                watchdog.start(0)
            except RuntimeError:
                code = 2 if watchdog.armed else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert watchdog.armed
    let_it_beat(board)


def test_death_watch_of_an_empty_board(board: Board) -> None:
    watch = DeathWatch(board)
    assert not watch.add(0)
    with pytest.raises(IndexError):
        watch.add(1)
    assert watch.take() == []
    watch.remove(0)
    watch.close()
    watch.close()
    with pytest.raises(ValueError, match="closed"):
        watch.take()


def test_death_watch_sees_a_clean_stop_as_no_death(board: Board, watchdog: Watchdog) -> None:
    watch = DeathWatch(board)
    assert watch.supported == DeathWatch.supported
    assert watch.add(0) == watch.supported
    watchdog.stop()
    assert not watch.add(0)
    assert watch.take() == []
    watch.close()
