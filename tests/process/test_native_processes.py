"""The native module across processes: the barrier, kill -9, and reading a child's memory."""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from resilient_train._native import Board, DeathWatch, allow_readers, die_with_parent, read_process_memory

TIMEOUT_S = 30

RANK = """
import signal, sys
from resilient_train._native import Board, Watchdog, die_with_parent
die_with_parent(signal.SIGKILL)
board, rank, generation = Board.attach(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
watchdog = Watchdog(board, rank, beat_ms=10, signal_number=signal.SIGUSR1)
watchdog.start(generation)
print("alive", flush=True)
sys.stdin.readline()
watchdog.stop()
print("stopped", flush=True)
sys.stdin.readline()
"""

BARRIER = """
import signal, sys
from resilient_train._native import Board, Page, die_with_parent
die_with_parent(signal.SIGKILL)
board = Board.attach(int(sys.argv[1]))
page = Page(board, int(sys.argv[2]))
for commits in range(1, 301):
    page.arrive(commits, 1, commits)
    assert page.cross(commits, 1, 1, commits, 0), "stopped"
    assert all(board.standing(other) >= (commits, 1) for other in range(board.world_size))
print("through", flush=True)
print("passed" if page.cross(301, 1, 1, 301, 0) else "stopped", flush=True)
"""

MEMORY = """
import ctypes, signal, sys
from resilient_train._native import allow_readers, die_with_parent
die_with_parent(signal.SIGKILL)
allow_readers()
data = bytes(range(256)) * 4096
buffer = ctypes.create_string_buffer(data, len(data))
print(ctypes.addressof(buffer), len(data), flush=True)
sys.stdin.readline()
"""

ORPHAN = """
import ctypes, os, signal, sys
from resilient_train._native import adopt_orphans, die_with_parent, fork_orphan
die_with_parent(signal.SIGKILL)
adopt_orphans()
mine, its = [], ctypes.create_string_buffer(8)
readable, writable = os.pipe()
between = os.fork()
if between == 0:
    mine.append("between")
    os.register_at_fork(after_in_child=lambda: mine.append("hook"))
    pid = fork_orphan()
    if pid == 0:
        mine.append("orphan")
        ctypes.memset(its, 1, 8)
        sys.stdin.readline()
        said = [os.getsid(0) == os.getpgid(0) == os.getpid(), os.getppid(), mine, its.raw == bytes(8)]
        print(*said, flush=True)
        os._exit(7)
    os.write(writable, f"{pid} {mine} {its.raw == bytes(8)}".encode())
    signal.pause()
print(os.getpid(), os.read(readable, 99).decode(), flush=True)
pid, status = os.wait()
print(pid, os.waitstatus_to_exitcode(status), flush=True)
os.kill(between, signal.SIGKILL)
os.wait()
"""


class Children:
    def __init__(self) -> None:
        self.all: list[subprocess.Popen[str]] = []

    def start(self, code: str, board: Board | None, *arguments: int) -> subprocess.Popen[str]:
        fds = [] if board is None else [board.fd]
        child = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, [*fds, *arguments])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            text=True,
        )
        self.all.append(child)
        return child


@pytest.fixture
def children() -> Iterator[Children]:
    children = Children()
    try:
        yield children
    finally:
        for child in children.all:
            child.kill()
            child.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(3)
    yield board
    board.close()


@pytest.fixture
def watch(board: Board) -> Iterator[DeathWatch]:
    watch = DeathWatch(board)
    if not watch.supported:
        pytest.skip("this kernel has no futex_waitv")
    yield watch
    watch.close()


def read_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], TIMEOUT_S)[0], "the child says nothing"
    return child.stdout.readline().strip()


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def wait_deaths(watch: DeathWatch, count: int) -> list[tuple[int, int]]:
    deaths: list[tuple[int, int]] = []
    while len(deaths) < count:
        assert select.select([watch.fd], [], [], TIMEOUT_S)[0], f"only {deaths}"
        deaths += watch.take()
    return deaths


def start_rank(children: Children, board: Board, rank: int, generation: int = 0) -> subprocess.Popen[str]:
    child = children.start(RANK, board, rank, generation)
    assert read_line(child) == "alive"
    return child


def test_an_orphan_is_born_to_who_adopts(children: Children) -> None:
    """It has memory of its own, leads a session, and who has forked it is not its parent, though it lives."""
    child = children.start(ORPHAN, None)
    parent, pid, rest = read_line(child).split(" ", 2)
    assert rest == "['between'] True", "what runs between is not seen by its parent"
    tell(child)
    assert read_line(child) == f"True {parent} ['between', 'hook', 'orphan'] False"
    assert read_line(child) == f"{pid} 7"
    assert child.wait(TIMEOUT_S) == 0


def test_barrier_and_stop_between_processes(children: Children, board: Board) -> None:
    ranks = [children.start(BARRIER, board, rank) for rank in range(3)]
    assert [read_line(child) for child in ranks] == ["through"] * 3
    board.raise_stop(1)
    assert [read_line(child) for child in ranks] == ["stopped"] * 3


def test_kill_is_noticed_once(children: Children, board: Board, watch: DeathWatch) -> None:
    victims = {rank: start_rank(children, board, rank) for rank in (0, 1)}
    survivor = start_rank(children, board, 2)
    assert all(watch.add(rank) for rank in range(3))
    for victim in victims.values():
        victim.kill()
    deaths = wait_deaths(watch, 2)
    assert sorted(rank for rank, _ in deaths) == [0, 1]
    assert all(time_ns > 0 for _, time_ns in deaths)
    assert watch.take() == []
    assert survivor.poll() is None


def test_replaced_rank_is_watched_again(children: Children, board: Board, watch: DeathWatch) -> None:
    for generation in range(3):
        child = start_rank(children, board, 1, generation)
        assert watch.add(1)
        child.send_signal(signal.SIGKILL)
        assert [rank for rank, _ in wait_deaths(watch, 1)] == [1]
        watch.remove(1)
        assert not watch.add(1)  # the dead word was cleared: nobody lives there


def test_death_before_add_is_still_noticed(children: Children, board: Board, watch: DeathWatch) -> None:
    child = start_rank(children, board, 1)
    child.kill()
    child.wait(TIMEOUT_S)
    assert watch.add(1)
    assert [rank for rank, _ in wait_deaths(watch, 1)] == [1]


def test_clean_stop_is_not_a_death(children: Children, board: Board, watch: DeathWatch) -> None:
    leaving, dying = start_rank(children, board, 0), start_rank(children, board, 1)
    assert watch.add(0)
    assert watch.add(1)
    tell(leaving)
    assert read_line(leaving) == "stopped"
    leaving.kill()
    leaving.wait(TIMEOUT_S)
    dying.kill()
    assert [rank for rank, _ in wait_deaths(watch, 1)] == [1]


def test_removed_rank_is_not_reported(children: Children, board: Board, watch: DeathWatch) -> None:
    removed, watched = start_rank(children, board, 0), start_rank(children, board, 1)
    assert watch.add(0)
    assert watch.add(1)
    watch.remove(0)
    removed.kill()
    removed.wait(TIMEOUT_S)
    watched.kill()
    assert [rank for rank, _ in wait_deaths(watch, 1)] == [1]


def test_beats_go_on_while_the_main_thread_is_busy_elsewhere(children: Children, board: Board) -> None:
    child = start_rank(children, board, 1)
    seen = board.beats(1)
    while board.beats(1) < seen + 3:
        assert not board.wait_stop(0, 5)
        assert child.poll() is None


def test_standing_survives_kill(children: Children, board: Board) -> None:
    child = children.start(BARRIER, board, 0)
    while board.standing(0) != (1, 1):
        assert child.poll() is None
        board.wait_stop(0, 1)
    child.kill()
    child.wait(TIMEOUT_S)
    assert board.standing(0) == (1, 1)
    assert board.step(0) == 1


def test_read_process_memory(children: Children) -> None:
    child = children.start(MEMORY, None)
    address, size_bytes = map(int, read_line(child).split())
    target = ctypes.create_string_buffer(size_bytes)
    local = ctypes.addressof(target)
    chunk_bytes = 512  # more spans than one system call takes
    spans = [(address + at, local + at, chunk_bytes) for at in range(0, size_bytes, chunk_bytes)]
    read_process_memory(child.pid, [*spans, (0, 0, 0)])
    assert target.raw == bytes(range(256)) * 4096
    with pytest.raises(OSError, match="Bad address"):
        read_process_memory(child.pid, [(8, local, 8)])
    with pytest.raises(OSError, match="Bad address"):
        read_process_memory(child.pid, [(address, local, 8), (8, local, 8)])
    child.kill()
    child.wait(TIMEOUT_S)
    with pytest.raises(ProcessLookupError):
        read_process_memory(child.pid, [(address, local, 8)])


def test_die_with_parent(children: Children) -> None:
    code = """
import subprocess, sys
inner = "import sys, signal; from resilient_train._native import die_with_parent; " \\
        "die_with_parent(signal.SIGKILL); print('up', flush=True); sys.stdin.readline()"
pipe = subprocess.PIPE
child = subprocess.Popen([sys.executable, "-c", inner], stdin=pipe, stdout=pipe, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
"""
    child = children.start(code, None)
    pidfd = os.pidfd_open(int(read_line(child)))
    try:
        child.kill()
        assert select.select([pidfd], [], [], TIMEOUT_S)[0], "the grandchild outlived its parent"
    finally:
        os.close(pidfd)


def test_prctl_errors() -> None:
    allow_readers()
    with pytest.raises(OSError, match="Invalid argument"):
        die_with_parent(1000)
