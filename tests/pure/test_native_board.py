"""The shared board inside one process: layout, hostile files, barrier, stop word."""

import fcntl
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from resilient_train._native import BOARD_VERSION, Board, Page

PAGE_BYTES = 8192
MAGIC = b"RBOARD01"
F_ADD_SEALS = 1033
F_SEAL_SHRINK = 2


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(3)
    yield board
    board.close()


def sealed_file(content: bytes, *, seal: bool = True) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    if seal:
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
    return fd


def header(magic: bytes = MAGIC, version: int = BOARD_VERSION, world_size: int = 1, pages: int = 2) -> bytes:
    return struct.pack("<8sIIII", magic, version, world_size, 0, 0).ljust(pages * PAGE_BYTES, b"\0")


def test_layout_is_the_documented_one(board: Board) -> None:
    Page(board, 1).write(commits=5, phase=3, step=77)
    Page(board, 1).enter()
    board.set_identity(1, generation=4, incarnation=2, pid=999)
    board.set_tail(1, entered=8, completed=7)
    board.raise_stop(6)
    page0 = os.pread(board.fd, PAGE_BYTES, 0)
    assert struct.unpack_from("<8sIII", page0) == (MAGIC, BOARD_VERSION, 3, 6)
    page = os.pread(board.fd, PAGE_BYTES, 2 * PAGE_BYTES)
    standing, step, collectives, generation, incarnation, pid, stopped, beats, entered, completed = struct.unpack_from(
        "<QQQIIIIQQQ", page
    )
    assert (standing, step, collectives) == (5 << 8 | 3, 77, 1)
    assert (generation, incarnation, pid, stopped, beats, entered, completed) == (4, 2, 999, 0, 0, 8, 7)
    board.set_kept(1, 2**64 - 1, 30)
    assert board.kept(1) == (2**64 - 1, 30)
    assert struct.unpack_from("<QQ", os.pread(board.fd, PAGE_BYTES, 2 * PAGE_BYTES), 96) == (2**64 - 1, 30)
    assert os.fstat(board.fd).st_size == 4 * PAGE_BYTES


def test_a_report_is_asked_of_all_and_answered_by_each(board: Board) -> None:
    assert (board.report_asked, board.reported(2)) == (0, 0)
    board.ask_report()
    board.ask_report()
    board.set_reported(2, 1)
    assert board.report_asked == 2
    assert [board.reported(rank) for rank in range(3)] == [0, 0, 1]
    assert struct.unpack_from("<I", os.pread(board.fd, PAGE_BYTES, 0), 56) == (2,)
    assert struct.unpack_from("<I", os.pread(board.fd, PAGE_BYTES, 3 * PAGE_BYTES), 144) == (1,)
    with pytest.raises(IndexError):
        board.set_reported(3, 1)


def test_two_announcements_are_held(board: Board) -> None:
    assert [board.announced(commits) for commits in range(4)] == [0, 0, 0, 0]
    board.announce(7, 2)
    board.announce(8, 1)
    assert [board.announced(commits) for commits in range(6, 10)] == [0, 2, 1, 0]
    board.announce(9, 3)
    assert [board.announced(commits) for commits in range(6, 10)] == [0, 0, 1, 3]
    board.announce(2**56 - 1, 3)
    assert board.announced(2**56 - 1) == 3
    for wrong in ((2**56, 1), (1, 4)):
        with pytest.raises(ValueError, match=r"2\*\*56|0\.\.3"):
            board.announce(*wrong)
    assert board.settled == 0
    board.settle(8)
    assert board.settled == 8
    assert struct.unpack_from("<QQQ", os.pread(board.fd, 48, 0), 24) == (8 << 2 | 1, (2**56 - 1) << 2 | 3, 8)


def test_a_pause_is_due_from_a_step_on(board: Board) -> None:
    page = Page(board, 1)
    assert not page.pause_due(0)
    assert not page.pause_due(2**63)
    board.set_pause(6)
    assert [page.pause_due(step) for step in (0, 4, 5, 6)] == [False, False, True, True]
    assert struct.unpack_from("<Q", os.pread(board.fd, 56, 0), 48) == (6,)
    board.set_pause(1)
    assert page.pause_due(0)
    board.set_pause(0)
    assert not page.pause_due(5)


def through_a_window(page: Page, commits: int, duration_ns: int) -> None:
    page.restart()
    page.add_computed(duration_ns)
    page.write(commits - 1, 2, commits)
    assert page.cross(commits - 1, 2, 3, commits, 0)
    page.begin(commits, 0, commits)


def test_the_last_windows_are_held() -> None:
    board = Board.create(1)
    page = Page(board, 0)
    assert board.computed(0, 0) == []
    for commits in range(1, 301):
        through_a_window(page, commits, 1_000_000 * commits)
    held = board.computed(0, 0)
    assert [commits for commits, _, _ in held] == list(range(173, 301))
    assert all(step == commits and 0 <= ns - 1_000_000 * commits < 10**9 for commits, step, ns in held)
    assert [commits for commits, _, _ in board.computed(0, 298)] == [299, 300]
    assert board.computed(0, 300) == board.computed(0, 2**63) == []
    offset = PAGE_BYTES + 152 + 24 * (300 % 128)
    assert struct.unpack_from("<QQ", os.pread(board.fd, 16, offset)) == (300, 300)


def test_of_two_that_begin_other_calls_the_later_sees_it() -> None:
    board = Board.create(3)
    pages = [Page(board, rank) for rank in range(3)]
    assert pages[0].begin_call(7, 70, 1, 2) is None, "it is the first"
    assert pages[1].begin_call(7, 70, 0, 2) is None
    assert pages[2].begin_call(7, 71, 1, 0) == (1, 70), "the first of the two that it looks at"
    assert pages[0].begin_call(8, 71, 1, 2) is None, "another place"
    assert pages[1].begin_call(7 + 256, 70, 2, 2) is None
    assert pages[0].begin_call(7, 72, 1, 1) is None, "it is overwritten there, and nobody knows"
    assert pages[0].begin_call(2**64 - 1, 2**64 - 1, 1, 2) is None
    pages[0].enter()
    assert pages[0].begin_call(9, 90, 1, 2) is None
    pages[0].take_back_call(9, counted=True)
    assert board.progress(0)[2] == 0
    assert pages[1].begin_call(9, 91, 0, 2) is None, "the other has not begun it after all"
    for tag, word in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="a call has a tag and a word"):
            pages[0].begin_call(tag, word, 1, 2)
    assert struct.unpack_from("<QQ", os.pread(board.fd, 16, 3 * PAGE_BYTES + 3224 + 16 * 7)) == (7, 71)


def test_a_window_that_was_none_is_held_as_such() -> None:
    board = Board.create(1)
    page = Page(board, 0)
    page.begin(0, 0, 0)
    page.add_computed(5)
    page.begin(1, 0, 0)
    page.write(1, 2, 1)
    page.cross(1, 2, 3, 1, 0)
    page.begin(2, 0, 1)
    through_a_window(page, 3, -5)
    assert [(commits, ns) for commits, _, ns in board.computed(0, 0)] == [(1, 0), (2, 0), (3, 0)]
    page.write(2**56 - 1, 0, 0)
    assert board.computed(0, 0) == [], "what it holds is of other updates"


def test_accessors_round_trip(board: Board) -> None:
    Page(board, 2).write(2**56 - 1, 255, 2**64 - 1)
    assert board.standing(2) == (2**56 - 1, 255)
    assert board.step(2) == 2**64 - 1
    assert board.standing(0) == (0, 0)
    board.set_identity(2, 1, 2, 3)
    assert board.identity(2) == (1, 2, 3)
    board.set_tail(2, 11, 10)
    assert board.tail(2) == (11, 10)
    assert board.stopped_generation(2) == 0
    assert board.beats(2) == 0
    assert board.order(2) == 0
    board.set_order(2, 1)
    assert not board.exchange_order(2, 0, 5)
    assert board.exchange_order(2, 1, 2**32 - 1)
    assert [board.order(rank) for rank in range(3)] == [0, 0, 2**32 - 1]


def test_attach_shares_the_memory_and_has_its_own_descriptor(board: Board) -> None:
    other = Board.attach(board.fd)
    assert other.fd != board.fd
    assert not os.get_inheritable(other.fd)
    assert other.world_size == 3
    Page(other, 0).write(1, 2, 3)
    board.close()
    assert other.standing(0) == (1, 2)
    other.close()


def test_bad_arguments(board: Board) -> None:
    for call in (board.standing, board.step, board.beats, board.tail, board.identity, board.order):
        with pytest.raises(IndexError):
            call(3)
    with pytest.raises(IndexError):
        board.computed(3, 0)
    with pytest.raises(IndexError):
        Page(board, 3)
    with pytest.raises(ValueError, match="phase"):
        Page(board, 0).write(0, 256, 0)
    with pytest.raises(ValueError, match="commits"):
        Page(board, 0).write(2**56, 0, 0)
    with pytest.raises(ValueError, match="timeout_ms"):
        board.wait_stop(0, -1)
    with pytest.raises(ValueError, match="world_size"):
        Board.create(0)
    with pytest.raises(TypeError):
        board.standing(-1)


def test_close_is_idempotent_and_final(board: Board) -> None:
    board.close()
    board.close()
    for call in (
        lambda: board.fd,
        lambda: board.standing(0),
        lambda: board.raise_stop(1),
        lambda: board.world_size,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sealed_file(header(), seal=False), "sealed"),
        (lambda: sealed_file(header(magic=b"NOTABORD")), "magic"),
        (lambda: sealed_file(header(version=BOARD_VERSION + 1)), "version"),
        (lambda: sealed_file(header(world_size=2)), "ranks"),
        (lambda: sealed_file(header(pages=1)), "bytes"),
        (lambda: sealed_file(header() + b"x"), "bytes"),
        (lambda: sealed_file(b""), "bytes"),
        (lambda: os.open("/dev/null", os.O_RDWR), "sealed"),
    ],
)
def test_a_hostile_file_is_refused(make: Callable[[], int], text: str) -> None:
    fd = make()
    try:
        with pytest.raises(ValueError, match=text):
            Board.attach(fd)
    finally:
        os.close(fd)


def test_a_right_file_made_by_hand_is_accepted() -> None:
    fd = sealed_file(header())
    try:
        Board.attach(fd).close()
    finally:
        os.close(fd)


def test_attach_of_a_bad_descriptor_is_an_oserror() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Board.attach(-1)


def test_board_cannot_be_resized(board: Board) -> None:
    for size in (0, 100 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(board.fd, size)


def test_barrier_lets_nobody_through_early() -> None:
    world_size, rounds = 3, 300
    board = Board.create(world_size)

    def run(rank: int) -> None:
        page = Page(board, rank)
        for commits in range(1, rounds + 1):
            page.arrive(commits, 2, commits)
            assert page.cross(commits, 2, 3, commits, 0)
            assert all(board.standing(other) >= (commits, 2) for other in range(world_size))

    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(run, range(world_size)))


def test_passed_wins_over_stopped(board: Board) -> None:
    pages = [Page(board, rank) for rank in range(3)]
    assert not pages[0].arrive(1, 1, 1)
    board.raise_stop(1)
    assert not pages[0].cross(1, 1, 2, 1, 0)
    assert board.standing(0) == (1, 1), "nothing is written"
    assert not pages[1].arrive(1, 2, 1)
    assert pages[2].arrive(1, 1, 1)
    assert pages[0].cross(1, 1, 2, 1, 0)
    assert board.standing(0) == (1, 2)


def test_stop_wakes_waiters(board: Board) -> None:
    with ThreadPoolExecutor(2) as pool:
        barrier = pool.submit(Page(board, 0).cross, 1, 1, 2, 1, 0)
        stop = pool.submit(board.wait_stop, 0, 60_000)
        board.raise_stop(3)
        assert not barrier.result(timeout=10)
        assert stop.result(timeout=10)
    assert board.stop_generation == 3
    assert not board.wait_stop(3, 1)


@pytest.mark.parametrize("generation", [0, 4, 5])
def test_stop_generation_only_grows(board: Board, generation: int) -> None:
    board.raise_stop(5)
    with pytest.raises(ValueError, match="grows"):
        board.raise_stop(generation)
    assert board.stop_generation == 5


def test_a_close_does_not_pull_the_memory_from_under_a_waiter(board: Board) -> None:
    other = Board.attach(board.fd)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(board.wait_stop, 0, 60_000)
        board.close()
        other.raise_stop(1)
        try:
            assert waiter.result(timeout=10)
        except ValueError:  # closed before the thread came to call
            pass
    other.close()


class InterruptedByTestError(Exception):
    pass


@pytest.mark.parametrize("wait", ["cross", "wait_stop"])
def test_a_signal_handler_runs_during_a_wait(board: Board, wait: str) -> None:
    def handler(_number: int, _frame: object) -> None:
        raise InterruptedByTestError

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        start = time.monotonic()
        with pytest.raises(InterruptedByTestError):
            timer.start()
            if wait == "cross":
                Page(board, 0).cross(1, 1, 2, 1, 0)
            else:
                board.wait_stop(0, 60_000)
        assert time.monotonic() - start < 30
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
