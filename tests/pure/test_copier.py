"""The copier: bytes and digests against what slices and the xxhash package say."""

import ctypes
import errno
import gc
import mmap
import os
import platform
import random
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_train._native import DIGEST_CHUNK_BYTES, Copier, Word, limit_instructions, populate

INSTRUCTIONS = ("neon", "portable") if platform.machine() == "aarch64" else ("avx2", "sse2", "portable")
EDGES = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 16383, 16384, 16447, 16448, 16449, 65536)
CHUNK_EDGES = tuple(DIGEST_CHUNK_BYTES + more for more in (-1, 0, 1, 63, 64, 65, 240, 241, 16448))
TIMEOUT_MS = 20_000

Piece = tuple[int, int, int]


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    if not limit_instructions(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    assert any(map(limit_instructions, INSTRUCTIONS))


def digests(image: bytes) -> bytes:
    chunks = range(0, len(image), DIGEST_CHUNK_BYTES)
    return b"".join(xxhash.xxh3_128_digest(image[start : start + DIGEST_CHUNK_BYTES]) for start in chunks)


def place(parts: list[tuple[int, bytes]], total: int) -> tuple[list[Piece], list[ctypes.Array], bytes]:
    """Buffers for (gap, bytes) parts, their pieces, and the image of ``total`` bytes that they make."""
    image, at, pieces, buffers = bytearray(total), 0, [], []
    for gap, data in parts:
        at += gap
        buffers.append(ctypes.create_string_buffer(data, max(1, len(data))))
        pieces.append((ctypes.addressof(buffers[-1]), len(data), at))
        image[at : at + len(data)] = data
        at += len(data)
    return pieces, buffers, bytes(image)


def mapping(total: int) -> mmap.mmap:
    memory = mmap.mmap(-1, total + 4096)
    memory[:] = b"\xff" * len(memory)
    return memory


def check(copier: Copier, parts: list[tuple[int, bytes]], slack: int = 0) -> None:
    total = sum(gap + len(data) for gap, data in parts) + slack
    pieces, buffers, image = place(parts, total)
    memory = mapping(total)
    with memoryview(memory)[:total] as view:
        copier.gather(view, pieces, owner=buffers)
        assert copier.wait(TIMEOUT_MS)
        assert bytes(view) == image
        assert copier.digests() == digests(image)
        assert memory[total : total + 64] == b"\xff" * 64
        for buffer in buffers:
            ctypes.memset(buffer, 0, len(buffer))
        copier.scatter(view, pieces)
        check_landed(copier, image, parts, buffers)
    memory.close()
    with tempfile.TemporaryFile() as file:
        file.write(b"\xff" * (total % 5_000) + image)
        file.flush()
        for buffer in buffers:
            ctypes.memset(buffer, 0, len(buffer))
        copier.read(file.fileno(), total % 5_000, total, pieces, owner=buffers)
        check_landed(copier, image, parts, buffers)


def check_landed(copier: Copier, image: bytes, parts: list[tuple[int, bytes]], buffers: list[ctypes.Array]) -> None:
    assert copier.wait(TIMEOUT_MS)
    assert copier.digests() == digests(image)
    for buffer, (_, data) in zip(buffers, parts, strict=True):
        assert buffer.raw[: len(data)] == data


@pytest.mark.parametrize("total", [*EDGES, *CHUNK_EDGES])
def test_one_piece_of_every_awkward_length(instructions: str, total: int) -> None:
    check(Copier(), [(0, random.Random(total).randbytes(total))])


@pytest.mark.parametrize("seed", range(6))
def test_many_pieces_that_are_multiples_of_nothing(seed: int) -> None:
    draw = random.Random(seed)
    sizes = (1, 3, 8, 100, 1_000, 16_384, 20_001, 300_007, 2_000_003)
    parts = [(draw.choice((0, 0, 1, 7, 64, 5_000)), draw.randbytes(draw.choice(sizes))) for _ in range(40)]
    check(Copier(draw.choice((1, 2, 5))), parts, slack=draw.randrange(100))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.binary(max_size=3_000)), max_size=12), st.integers(0, 70))
def test_any_small_pieces(parts: list[tuple[int, bytes]], slack: int) -> None:
    check(Copier(1), parts, slack)


def test_without_a_hash() -> None:
    copier, data = Copier(), random.Random(1).randbytes(5_000_000)
    pieces, buffers, image = place([(3, data)], len(data) + 3)
    memory = mmap.mmap(-1, len(image))
    copier.gather(memory, pieces, hashed=False, owner=buffers)
    assert copier.wait(TIMEOUT_MS)
    assert memory[:] == image
    with pytest.raises(RuntimeError, match="not asked to hash"):
        copier.digests()


def test_what_is_refused() -> None:
    copier, memory = Copier(), mmap.mmap(-1, 4096)
    with pytest.raises(ValueError, match="does not fit into an image of 4096"):
        copier.gather(memory, [(1, 100, 4000)])
    with pytest.raises(ValueError, match="begins before the end of the one before it"):
        copier.gather(memory, [(1, 100, 0), (1, 100, 50)])
    with pytest.raises(ValueError, match="address 0"):
        copier.gather(memory, [(0, 1, 0)])
    with pytest.raises(ValueError, match="multiple of 64"):
        copier.gather(memoryview(memory)[1:], [])
    with pytest.raises(BufferError):
        copier.gather(b"read-only", [])
    with pytest.raises(RuntimeError, match="no copy was started"):
        copier.wait(0)
    with pytest.raises(ValueError, match="threads"):
        Copier(0)
    with pytest.raises(ValueError, match="nice"):
        Copier(nice=-1)


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    copier, data = Copier(), random.Random(1).randbytes(3 * DIGEST_CHUNK_BYTES)
    (tmp_path / "short").write_bytes(data)
    with (tmp_path / "short").open("r+b") as file:
        copier.read(file.fileno(), 100, len(data), [])
        for _ in range(2):  # it stays failed
            with pytest.raises(OSError, match=os.strerror(errno.ENODATA)) as caught:
                copier.wait(TIMEOUT_MS)
            assert caught.value.errno == errno.ENODATA
        assert copier.done
        with pytest.raises(RuntimeError, match="not run to its end"):
            copier.digests()
        copier.abort()
        copier.read(file.fileno(), 0, len(data), [])
        assert copier.wait(TIMEOUT_MS)
        assert copier.digests() == digests(data)
    folder = os.open(tmp_path, os.O_RDONLY)
    copier.read(folder, 0, 10, [])
    with pytest.raises(IsADirectoryError):
        copier.wait(TIMEOUT_MS)
    os.close(folder)
    with pytest.raises(ValueError, match="descriptor"):
        copier.read(-1, 0, 10, [])


def test_the_owner_of_what_is_read_into_stays_until_then(tmp_path: Path) -> None:
    class Owner:
        pass

    copier, owner = Copier(), Owner()
    gone = weakref.ref(owner)
    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open("rb") as file:
        copier.read(file.fileno(), 0, 2, [], owner=owner)
        del owner
        gc.collect()
        assert gone() is not None
        with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
            copier.wait(TIMEOUT_MS)
        assert gone() is None


def test_the_image_and_its_owner_stay_until_the_copy_is_over() -> None:
    class Owner:
        pass

    copier, owner, memory = Copier(), Owner(), mmap.mmap(-1, 100)
    gone = weakref.ref(owner)
    copier.scatter(memory, [], owner=owner)
    del owner
    gc.collect()
    assert gone() is not None
    with pytest.raises(BufferError):
        memory.close()
    assert copier.wait(TIMEOUT_MS)
    assert gone() is None
    memory.close()


def test_abort_lets_go() -> None:
    memory, source = mmap.mmap(-1, 64 << 20), bytearray(64 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    copier = Copier(1, nice=10)
    copier.gather(memory, [(address, len(source), 0)], owner=source)
    copier.abort()
    assert copier.done
    memory.close()
    copier.abort()


def test_an_aborted_copy_has_no_digests() -> None:
    memory = mmap.mmap(-1, 256 << 20)
    copier = Copier(1)
    copier.scatter(memory, [])
    copier.abort()
    with pytest.raises(RuntimeError, match="not run to its end"):
        copier.digests()
    copier.scatter(memoryview(memory)[:1000], [])
    assert copier.wait(TIMEOUT_MS)
    assert copier.digests() == digests(bytes(1000))


def test_a_hash_that_begins_behind_another_copy() -> None:
    """What changes while that is under way is in the hash."""
    large, word = mmap.mmap(-1, 512 << 20), bytearray(b"before")
    pieces = [(ctypes.addressof(ctypes.c_char.from_buffer(word)), len(word), 0)]
    first, second = Copier(1), Copier()
    first.scatter(large, [])
    second.hash(pieces, owner=word, after=first)
    word[:] = b"behind"
    assert not first.done, "the machine is too fast for this test: make it larger"
    assert second.wait(TIMEOUT_MS)
    assert first.done
    assert second.digests() == digests(b"behind")
    second.hash(pieces, after=first)
    assert second.wait(TIMEOUT_MS), "it is over"
    second.hash(pieces, after=Copier())
    assert second.wait(TIMEOUT_MS), "there was none"
    with pytest.raises(ValueError, match="when it is over itself"):
        second.hash(pieces, after=second)


@pytest.mark.parametrize("which", ["first", "second"])
def test_of_two_one_is_aborted(which: str) -> None:
    large, word = mmap.mmap(-1, 512 << 20), bytearray(b"word")
    pieces = [(ctypes.addressof(ctypes.c_char.from_buffer(word)), len(word), 0)]
    for _ in range(20):
        first, second = Copier(1), Copier()
        first.scatter(large, [])
        second.hash(pieces, owner=word, after=first)
        if which == "first":
            first.abort()
            assert second.wait(TIMEOUT_MS)
            assert second.digests() == digests(b"word")
        else:
            second.abort()
            assert second.done
            first.abort()


def test_no_thread_before_the_first_copy() -> None:
    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    before = threads()
    copier = Copier(3)
    assert threads() <= before
    copier.scatter(bytes(10), [])
    assert copier.wait(TIMEOUT_MS)
    assert len(threads() - before) == 3
    del copier
    assert threads() <= before


def test_a_fork_copies_with_threads_of_its_own() -> None:
    copier, memory = Copier(), mmap.mmap(-1, 9_000_000)
    copier.scatter(memory, [])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            copier.scatter(memory, [])
            if copier.wait(TIMEOUT_MS) and copier.digests() == digests(bytes(len(memory))):
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert copier.wait(TIMEOUT_MS)
    assert copier.digests() == digests(bytes(len(memory)))


def test_a_signal_is_handled_while_waiting() -> None:
    class HeardError(Exception):
        pass

    def hear(*_: object) -> None:
        raise HeardError

    before = signal.signal(signal.SIGUSR1, hear)
    # Never written to, so it is one page of zeros, read for seconds: until it is aborted.
    memory = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    copier = Copier(1)
    about_to_wait = threading.Event()

    def send() -> None:
        about_to_wait.wait()
        time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        copier.scatter(memory, [])
        with pytest.raises(HeardError):
            about_to_wait.set()
            copier.wait(TIMEOUT_MS)
    finally:
        about_to_wait.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        copier.abort()


def test_populate_keeps_what_is_there() -> None:
    memory = mmap.mmap(-1, 5 << 20)
    memory[4096:4100] = b"kept"
    populate(memory)
    assert memory[4096:4100] == b"kept"
    resident = sum(map(int, (line.split()[1] for line in mapped(memory) if line.startswith("Rss:"))))
    assert resident == 5 << 10


def mapped(memory: mmap.mmap) -> list[str]:
    """The lines of smaps about this mapping."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        low, high = (int(part, 16) for part in lines[start].split(" ")[0].split("-"))
        if low <= address < high:
            return lines[start:end]
    raise AssertionError("not mapped")


def test_word() -> None:
    memory = mmap.mmap(-1, 4096)
    word = Word(memory, 64)
    assert word.exchange_if(0, 1 << 63)
    assert not word.exchange_if(0, 5)
    assert word.value == 1 << 63 == int.from_bytes(memory[64:72], "little")
    with pytest.raises(ValueError, match="multiple of 8"):
        Word(memory, 4)
    with pytest.raises(ValueError, match="no 8 bytes"):
        Word(memory, 4096)
    with pytest.raises(BufferError):
        memory.close()
    word.close()
    word.close()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        _ = word.value
