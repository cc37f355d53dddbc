"""A rank's arena: killed at any instant of a write, it never shows a payload that was not published whole."""

import mmap
import os
import resource
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_train.errors import ConfigError, ProtocolError
from resilient_train.state.arena import SLOTS, Arena, ArenaFullError

SLOT_BYTES = 256


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(SLOT_BYTES, 200)
    yield arena
    arena.close()


def reopened(arena: Arena) -> Arena:
    return Arena(os.dup(arena.fd))


def test_newest_of_an_update_wins(arena: Arena) -> None:
    arena.publish(4, b"after READY")
    arena.publish(5, b"next")
    arena.publish(4, b"after the tail")
    assert arena.published(4) == b"after the tail"
    assert arena.published(5) == b"next"
    assert arena.published(6) is None


def test_empty_arena_and_empty_payload(arena: Arena) -> None:
    assert arena.published(0) is None
    arena.publish(0, b"")
    assert arena.published(0) == b""


def test_it_outlives_the_process_that_wrote(arena: Arena) -> None:
    arena.publish(1, b"one")
    other = reopened(arena)
    other.publish(2, b"two")
    assert (other.published(1), arena.published(2)) == (b"one", b"two")
    other.close()


def test_where_files_may_not_be_so_large() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(ConfigError, match=r"bytes of shared memory for a rank can't be had: .*File too large"):
            Arena.create()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_last_slots_stay(arena: Arena) -> None:
    for commits in range(10):
        arena.publish(commits, str(commits).encode())
    kept = [arena.published(commits) for commits in range(10)]
    assert kept == [None] * (10 - SLOTS) + [str(c).encode() for c in range(10 - SLOTS, 10)]


def test_full(arena: Arena) -> None:
    arena.publish(1, bytes(SLOT_BYTES))
    with pytest.raises(ArenaFullError) as caught:
        arena.publish(2, bytes(SLOT_BYTES + 1))
    assert caught.value.needed_bytes == SLOT_BYTES + 1
    assert arena.published(1) == bytes(SLOT_BYTES)


def stores(before: bytes, after: bytes) -> list[tuple[int, int]]:
    return [(i, after[i]) for i in range(len(before)) if before[i] != after[i]]


def image(arena: Arena) -> bytes:
    return os.pread(arena.fd, os.fstat(arena.fd).st_size, 0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, SLOTS + 2), st.binary(min_size=1, max_size=40), st.data())
def test_any_part_of_a_write(published: int, payload: bytes, data: st.DataObject) -> None:
    """The stores of a publication, cut and reordered at will: what was published before, or the new, or nothing."""
    arena = Arena.create(64, 0)
    known = {commits: bytes([commits]) * 20 for commits in range(published)}
    for commits, content in known.items():
        arena.publish(commits, content)
    before = image(arena)
    arena.publish(published, payload)
    changes = stores(before, image(arena))
    for place, byte in data.draw(st.permutations(changes))[: data.draw(st.integers(0, len(changes)))]:
        before = before[:place] + bytes([byte]) + before[place + 1 :]
    os.pwrite(arena.fd, before, 0)
    torn = reopened(arena)
    assert torn.published(published) in (None, payload)
    for commits, content in known.items():
        assert torn.published(commits) in (None, content)
    for commits in range(max(0, published - SLOTS + 1), published):
        assert torn.published(commits) == known[commits], "only the oldest slot is written over"
    torn.close()
    arena.close()


@pytest.mark.parametrize("field", range(64 + 10))
def test_damage_anywhere_in_a_slot(field: int) -> None:
    arena = Arena.create(64, 0)
    arena.publish(3, b"0123456789")
    start = 4096 + (1 % SLOTS) * (64 + 64)
    content = os.pread(arena.fd, 1, start + field)
    os.pwrite(arena.fd, bytes([content[0] ^ 0xFF]), start + field)
    torn = reopened(arena)
    assert torn.published(3) in (None, b"0123456789")
    torn.publish(4, b"goes on")
    assert torn.published(4) == b"goes on"
    torn.close()
    arena.close()


def test_growth_keeps_publications_order_and_log(arena: Arena) -> None:
    for number in range(6):
        arena.publish(number // 2, str(number).encode())
    arena.log_begin(3)
    assert arena.log_append(1, b"meta", b"data")
    larger = arena.grown(10 * SLOT_BYTES)
    assert [larger.published(commits) for commits in range(3)] == [arena.published(commits) for commits in range(3)]
    assert larger.published(2) == b"5"
    larger.log_continue(arena)
    assert larger.log_append(2, b"", b"next")
    assert (larger.log_of, log_of(larger, 2)) == (3, [(1, b"meta", b"data"), (2, b"", b"next")])
    larger.publish(3, bytes(5 * SLOT_BYTES))
    assert larger.published(1) == b"3", "the oldest slot went, not this one"
    assert larger.published(2) == b"5"
    larger.close()


def test_growth_of_an_empty_arena() -> None:
    small = Arena.create(8, 0)
    larger = small.grown(64)
    larger.publish(0, b"x" * 64)
    assert larger.published(0) == b"x" * 64
    larger.close()
    small.close()


def log_of(arena: Arena, count: int) -> list[tuple[int, bytes, bytes]]:
    """The first entries of its log."""
    entries, offset = [], 0
    for _ in range(count):
        entry, offset = arena.log_read(offset)
        entries.append(tuple(entry))
    return entries


def test_log(arena: Arena) -> None:
    arena.log_begin(7)
    entries = [(0, b"m", b""), (1, b"", b"d" * 30), (0, b"meta", b"data")]
    assert all(arena.log_append(*entry) for entry in entries)
    reader = reopened(arena)
    assert (reader.log_of, log_of(reader, 3)) == (7, entries)
    arena.log_begin(8)
    assert arena.log_append(2, b"new", b"update")
    assert (reader.log_of, log_of(reader, 1)) == (8, [(2, b"new", b"update")])
    reader.close()


def test_a_full_log_takes_nothing(arena: Arena) -> None:
    assert not arena.log_append(0, b"", bytes(200 - 12 + 1))
    assert arena.log_append(0, b"", bytes(200 - 12))
    assert not arena.log_append(0, b"", b"")
    assert log_of(arena, 1) == [(0, b"", bytes(200 - 12))]


def test_what_lies_aside_takes_no_room_from_the_others(arena: Arena) -> None:
    assert arena.log_append(0, b"", bytes(100))
    assert arena.log_append(1, b"", bytes(200 - 12), aside=True)
    assert not arena.log_append(1, b"", b"", aside=True)
    assert arena.log_append(0, b"", bytes(200 - 100 - 24))
    assert arena.log_close(2)
    assert [len(data) for _, _, data in log_of(arena, 4)] == [100, 188, 76, 0]


@pytest.mark.parametrize("used", [0, 100, 200 - 12])
def test_a_log_can_always_be_closed(arena: Arena, used: int) -> None:
    assert arena.log_append(0, b"", bytes(used))
    assert arena.log_close(4)
    assert log_of(arena, 2) == [(0, b"", bytes(used)), (4, b"", b"")]
    assert not arena.log_close(4)
    assert not arena.log_append(0, b"", b"")
    arena.log_begin(1)
    assert arena.log_append(0, b"", b"next")


def test_a_damaged_log_does_not_lead_out_of_it(arena: Arena) -> None:
    arena.log_append(0, b"", b"x")
    os.pwrite(arena.fd, b"\xff\xff\xff\xff" * 2, os.fstat(arena.fd).st_size - 412 + 4)
    with pytest.raises(ProtocolError, match="runs over its end"):
        arena.log_read(0)


@pytest.mark.parametrize("offset", [412 - 11, 412, 10_000])
def test_an_entry_behind_the_log(arena: Arena, offset: int) -> None:
    with pytest.raises(ProtocolError, match="runs over its end"):
        arena.log_read(offset)


@pytest.mark.parametrize("content", [b"", b"x" * 5000, bytes(4096)])
def test_foreign_files(content: bytes) -> None:
    fd = os.memfd_create("foreign")
    os.write(fd, content)
    with pytest.raises(ProtocolError, match="is no arena"):
        Arena(fd)
    os.close(fd)


def test_cut_or_lying_header(arena: Arena) -> None:
    os.ftruncate(fd := os.memfd_create("cut"), 4096)
    whole = image(arena)
    for content in (whole[:-1], whole + b"\0", whole[:16] + b"\xff" * 16 + whole[32:]):
        os.ftruncate(fd, len(content))
        os.pwrite(fd, content, 0)
        with pytest.raises(ProtocolError, match="is no arena"):
            Arena(fd)
    os.close(fd)


def test_the_map_is_shared_memory(arena: Arena) -> None:
    with mmap.mmap(os.dup(arena.fd), 0) as other:
        arena.publish(1, b"seen by others")
        assert b"seen by others" in other[:]
