"""Slots and records: whatever the instant at which a writer dies, a reader finds the older or the newer snapshot."""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from resilient_train._native import Copier
from resilient_train.errors import ProtocolError, UsageError
from resilient_train.state.vault import slots
from resilient_train.state.vault.record import RECORD_BYTES, SlotState, Snapshot, pack, unpack
from resilient_train.state.vault.slots import Control, SlotPair, SnapshotDraft, Use, create, image_digest

CAPACITY = 1000


@pytest.fixture
def pair() -> Iterator[SlotPair]:
    pair = SlotPair(create(3, CAPACITY), writes=True)
    yield pair
    pair.close()


def picture(commits: int) -> bytes:
    return bytes([commits % 256]) * CAPACITY


def fill(draft: SnapshotDraft, commits: int) -> bytes:
    draft.image[:] = picture(commits)
    return image_digest(xxhash.xxh3_128_digest(picture(commits)))


def commit(draft: SnapshotDraft, commits: int, digest: bytes) -> Snapshot:
    return draft.commit(commits=commits, step=commits, image_bytes=CAPACITY, generation=1, world=4, digest=digest)


def take(pair: SlotPair, commits: int) -> Snapshot:
    draft = pair.begin()
    assert draft is not None
    return commit(draft, commits, fill(draft, commits))


def reader(pair: SlotPair) -> SlotPair:
    return SlotPair(os.dup(pair.fd), writes=False)


def found(pair: SlotPair) -> int | None:
    """The commits of what a reader takes, or None; its bytes are looked at."""
    other = reader(pair)
    newest = other.newest()
    if newest is not None:
        assert bytes(other.image(newest)) == picture(newest.commits)
        assert other.verified(Copier(1), newest, 10_000)
    other.close()
    return None if newest is None else newest.commits


def test_snapshots_alternate_and_the_newest_is_never_overwritten(pair: SlotPair) -> None:
    assert pair.newest() is None
    for commits in range(1, 8):
        snapshot = take(pair, commits)
        assert (snapshot.sequence, snapshot.slot) == (commits, (commits - 1) % 2)
        assert pair.newest() == snapshot
        assert [each.commits for each in pair.complete()] == [commits, commits - 1][: min(2, commits)]


def test_the_snapshot_to_be_kept_is_not_overwritten_however_old_it_is(pair: SlotPair) -> None:
    def taken(commits: int, keep: int) -> list[int]:
        draft = pair.begin(keep)
        assert draft is not None
        commit(draft, commits, fill(draft, commits))
        return [each.commits for each in pair.complete()]

    assert taken(1, keep=0) == [1]
    assert taken(2, keep=0) == [2], "one slot is enough while nothing is to be kept in here"
    assert taken(3, keep=2) == [3, 2]
    assert taken(4, keep=2) == [4, 2]
    assert taken(5, keep=4) == [5, 4]
    assert taken(6, keep=1) == [6, 4], "it lies elsewhere"
    kept = pair.complete()[1]
    assert pair.uses[1 - kept.slot].pin()
    assert pair.begin(4) is None, "it is not overwritten instead of one that is pinned, either"


class Killed(BaseException):
    pass


class Dying(SlotPair):
    """Its process dies when so many bytes of records are written."""

    left = 0

    def write_record(self, slot: int, data: bytes, offset: int = 0) -> None:
        super().write_record(slot, data[: self.left], offset)
        if len(data) > self.left:
            raise Killed
        self.left -= len(data)


def after(history: int) -> SlotPair:
    """A pair in which ``history`` snapshots were taken, at 1, 2, ..."""
    pair = SlotPair(create(3, CAPACITY), writes=True)
    for commits in range(1, history + 1):
        take(pair, commits)
    return pair


@pytest.mark.parametrize("history", range(4))
def test_a_writer_that_dies_after_any_byte_leaves_one_complete_snapshot(history: int) -> None:
    older = history or None
    seen = set()
    for allowed in range(2 * RECORD_BYTES + 1):
        pair = after(history)
        dying = Dying(os.dup(pair.fd), writes=True)
        dying.left = allowed
        try:
            take(dying, history + 1)
        except Killed:
            assert found(pair) in {older, history + 1}
        else:
            assert allowed == 2 * RECORD_BYTES
            assert found(pair) == history + 1
        seen.add(found(pair))
        assert pair.readable()[:1] == pair.complete()[:1], "what all may go on from can be read"
        for each in pair.readable():
            assert pair.uses[each.slot].pin()
            pair.uses[each.slot].unpin()
        successor = SlotPair(os.dup(pair.fd), writes=True)
        assert take(successor, 50).sequence > history
        assert found(successor) == 50
        successor.close()
        pair.close()
    assert seen == {older, history + 1}


def test_a_half_copied_image_is_never_the_newest(pair: SlotPair) -> None:
    take(pair, 1)
    draft = pair.begin()
    assert draft is not None
    draft.image[:500] = b"x" * 500
    assert found(pair) == 1
    successor = SlotPair(os.dup(pair.fd), writes=True)  # the writer died
    snapshot = take(successor, 2)
    assert (snapshot.sequence, found(successor)) == (3, 2)
    successor.close()
    draft.image.release()


def test_the_record_of_a_killed_writer_can_lie_only_about_its_own_slot(pair: SlotPair) -> None:
    """The control: with the newest slot as the target, which is wrong, the same kills do lose everything."""
    take(pair, 1)
    newest = pair.newest()
    assert newest is not None
    pair.write_record(newest.slot, pack(SlotState.WRITING, Snapshot(rank=3, slot=newest.slot, sequence=2)))
    assert found(pair) is None


@given(st.integers(0, RECORD_BYTES * 8 - 1))
def test_a_flipped_bit_makes_a_record_say_nothing(bit: int) -> None:
    data = bytearray(pack(SlotState.COMPLETE, Snapshot(rank=0, slot=0, sequence=7, image_bytes=5, digest=bytes(16))))
    assert unpack(bytes(data), 0, 0)[0] is SlotState.COMPLETE
    data[bit // 8] ^= 1 << bit % 8
    assert unpack(bytes(data), 0, 0) == (SlotState.EMPTY, Snapshot(rank=0, slot=0, sequence=0))


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    state, snapshot = unpack(data, 0, 0)
    assert state is SlotState.EMPTY
    assert snapshot.sequence == 0


def test_records_come_back_as_they_went() -> None:
    for digest in (b"", b"d" * 16):
        snapshot = Snapshot(
            rank=9, slot=1, sequence=1 << 60, commits=5, step=6, image_bytes=1 << 40, generation=7, world=8,
            time_ns=9, digest=digest,
        )  # fmt: skip
        for state in SlotState:
            assert unpack(pack(state, snapshot), 9, 1) == (state, snapshot)


def test_a_damaged_image_is_found_and_discarding_it_brings_back_the_older(pair: SlotPair) -> None:
    take(pair, 1)
    newest = take(pair, 2)
    pair.region(newest.slot)[17] ^= 1
    assert not pair.verified(Copier(1), newest, 10_000)
    pair.discard(newest.sequence)
    assert found(pair) == 1
    assert take(pair, 3).slot == newest.slot
    assert [each.commits for each in pair.complete()] == [3, 1]
    pair.discard(99)
    assert found(pair) == 3


def test_a_pinned_slot_is_skipped_and_told(pair: SlotPair) -> None:
    first = take(pair, 1)
    take(pair, 2)
    assert pair.uses[first.slot].pin()
    assert pair.begin() is None
    assert pair.begin() is None
    assert (pair.skipped, found(pair)) == (2, 2)
    pair.uses[first.slot].unpin()
    assert take(pair, 3).slot == first.slot


def test_a_slot_that_is_being_written_cannot_be_pinned(pair: SlotPair) -> None:
    draft = pair.begin()
    assert draft is not None
    use = Control(os.dup(pair.fd)).uses[0]
    assert not use.pin()
    draft.abandon()
    assert use.pin()
    use.close()


class FakeWord:
    """A word whose compare-and-exchange lets ``other`` act first, once, at the n-th access."""

    def __init__(self, at: int, other: Callable[["FakeWord"], object]) -> None:
        self.value_, self.left, self.other = 0, at, other

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.other(self)

    @property
    def value(self) -> int:
        self._step()
        return self.value_

    def exchange_if(self, expected: int, desired: int) -> bool:
        self._step()
        if self.value_ != expected:
            return False
        self.value_ = desired
        return True


def test_no_interleaving_lets_a_writer_and_a_reader_in() -> None:
    outcomes = set()
    for at in range(1, 6):
        entered: dict[str, bool] = {}
        word = FakeWord(at, lambda word, entered=entered: entered.update(writer=Use(word).claim()))
        entered["reader"] = Use(word).pin()
        outcome = entered.get("writer"), entered["reader"]
        assert outcome in {(True, False), (False, True), (None, True)}
        outcomes.add(outcome)
    assert {(True, False), (None, True)} <= outcomes


def test_pins_count_and_a_new_holder_forgets_them(pair: SlotPair) -> None:
    use = pair.uses[0]
    use.unpin()
    assert use.pins == 0
    for _ in range(3):
        assert use.pin()
    use.unpin()
    assert use.pins == 2
    use.forget_pins()
    assert use.pins == 0
    assert use.claim()
    use.forget_pins()
    assert not use.pin()


def test_misuse_is_said(pair: SlotPair) -> None:
    other = reader(pair)
    with pytest.raises(UsageError, match="opened for reading"):
        other.begin()
    other.close()
    draft = pair.begin()
    assert draft is not None
    with pytest.raises(UsageError, match="neither committed nor abandoned"):
        pair.begin()
    draft.abandon()
    with pytest.raises(UsageError, match="already"):
        draft.abandon()
    draft = pair.begin()
    assert draft is not None
    with pytest.raises(UsageError, match="an image of 1001 bytes in a slot of 1000"):
        draft.commit(commits=1, step=1, image_bytes=CAPACITY + 1, generation=0, world=1)
    assert pair.newest() is None
    copier = Copier(1)
    copier.gather(draft.image, [])
    with pytest.raises(BufferError):  # the copy has not been waited for
        draft.commit(commits=1, step=1, image_bytes=CAPACITY, generation=0, world=1)
    assert copier.wait(10_000)
    draft.abandon()


def memfd(data: bytes, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header_of(pair: SlotPair) -> bytes:
    return os.pread(pair.fd, 4096, 0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda header: memfd(header, 0), "shrunk"),
        (lambda _: memfd(b""), "0 bytes"),
        (memfd, "4096 bytes for images of 1000"),
        (lambda header: memfd(b"\0" * 4096 + header), "magic"),
        (lambda header: memfd(header[:20] + b"\1" + header[21:]), "checksum"),
        (lambda _: os.open("/dev/null", os.O_RDWR), "not a memfd"),
    ],
)
def test_foreign_descriptors_are_refused(pair: SlotPair, make: Callable[[bytes], int], reason: str) -> None:
    fd = make(header_of(pair))
    with pytest.raises(ProtocolError, match=reason):
        Control(fd)
    os.close(fd)


def test_nobody_can_change_its_size(pair: SlotPair) -> None:
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(pair.fd, size)


@pytest.mark.parametrize("capacity", [1, 4096, 65536, 65537, 5_000_000])
def test_images_lie_apart_and_at_page_boundaries(capacity: int) -> None:
    pair = SlotPair(create(0, capacity), writes=True)
    for slot, value in ((0, 1), (1, 2)):
        pair.region(slot)[:] = bytes([value]) * capacity
    assert [set(bytes(pair.region(slot))) for slot in range(slots.SLOTS)] == [{1}, {2}]
    assert pair.size_bytes == slots.total_bytes(capacity)
    with mmap.mmap(pair.fd, pair.size_bytes) as whole:
        for slot in range(slots.SLOTS):
            assert whole[slots.ALIGNMENT_BYTES + slot * slots.stride_bytes(capacity)] == slot + 1
    pair.prefault()
    assert pair.backed_bytes() == pair.size_bytes
    pair.close()
