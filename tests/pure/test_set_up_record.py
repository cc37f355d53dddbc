"""The record of the collectives before a loop: what is kept, and what counts as the same calls."""

import pytest

from resilient_train.errors import ProtocolError
from resilient_train.state.set_up_record import RESULT_BYTES, TOTAL_BYTES, DifferenceError, Recorded, SetUpRecord

COUNT, SHARE = b"count", b"share"


def record_of(*calls: tuple[str, bytes, str, bytes | None]) -> Recorded:
    record = SetUpRecord()
    for group, header, place, result in calls:
        entry, room = record.enter(group, header, place, len(result or b""))
        assert room
        assert entry is not None
        entry.result = result
    return Recorded(record.packed(), bytes.decode)


def test_each_call_is_answered_once_in_the_order_of_its_group() -> None:
    calls = record_of(("a", COUNT, "x:1", b"1"), ("b", COUNT, "x:2", b"2"), ("a", SHARE, "x:3", None))
    assert calls.next("b", COUNT, "y:1").result == b"2", "another thread may be first in another group"
    assert calls.next("a", COUNT, "y:2").result == b"1"
    assert calls.next("a", SHARE, "y:3").result is None
    calls.finish()


def test_who_it_was_from_is_kept() -> None:
    record = SetUpRecord()
    entry, _ = record.enter("a", COUNT, "x:1", 1)
    assert entry is not None
    entry.result, entry.source = b"1", 3
    assert Recorded(record.packed(), bytes.decode).next("a", COUNT, "y:1").source == 3


@pytest.mark.parametrize(
    ("group", "header", "words"),
    [
        ("a", SHARE, "y:1 calls share where its predecessor called count (x:1): call 1 of process group 'a'"),
        ("b", COUNT, "y:1 calls count of process group 'b' before the loop, and its predecessor made no such call"),
    ],
)
def test_another_call(group: str, header: bytes, words: str) -> None:
    calls = record_of(("a", COUNT, "x:1", b"1"))
    with pytest.raises(DifferenceError) as told:
        calls.next(group, header, "y:1")
    assert words in str(told.value)


def test_more_and_fewer_calls() -> None:
    calls = record_of(("a", COUNT, "x:1", b"1"), ("a", SHARE, "x:2", b"1"))
    calls.next("a", COUNT, "y:1")
    with pytest.raises(DifferenceError, match=r"without share, call 2 of process group 'a'.* at x:2"):
        calls.finish()
    calls.next("a", SHARE, "y:2")
    calls.finish()
    with pytest.raises(DifferenceError, match="made no such call"):
        calls.next("a", SHARE, "y:3")


def test_a_result_that_is_too_large_takes_no_room() -> None:
    record = SetUpRecord()
    entry, room = record.enter("a", COUNT, "x:1", RESULT_BYTES + 1)
    assert entry is not None
    assert not room
    assert record.enter("a", COUNT, "x:2", RESULT_BYTES)[1]


def test_the_whole_is_bounded() -> None:
    record = SetUpRecord()
    half = TOTAL_BYTES // RESULT_BYTES // 2
    kept = [record.enter("a", COUNT, "x:1", RESULT_BYTES)[1] for _ in range(half)]
    assert kept == [True] * (half - 1) + [False], "what the calls themselves take counts too"
    assert record.enter("a", COUNT, "x:2", TOTAL_BYTES // 2, whole=True)[1], "of what a process can't do without"
    kept = [record.enter("a", COUNT, "x:1", RESULT_BYTES, whole=True)[1] for _ in range(2)]
    assert kept == [False, False]
    assert record.full_at == ""
    assert record.enter("a", COUNT, "x:1", 0) is not None


def test_a_full_record_is_given_up() -> None:
    """A script without a loop of ours calls collectives for ever."""
    record, header = SetUpRecord(), bytes(1 << 20)
    for number in range(3):
        assert record.enter("a", header, f"x:{number}", 0)[0] is not None
    assert record.enter("a", header, "x:3", 0) == (None, False)
    assert record.full_at == "x:3"
    assert record.entries == []
    assert record.enter("a", COUNT, "x:4", 0) == (None, False), "or there would be a gap"
    assert record.full_at == "x:3"


def test_no_calls_and_no_record() -> None:
    for packed in (b"", SetUpRecord().packed()):
        Recorded(packed, bytes.decode).finish()
    with pytest.raises(ProtocolError):
        Recorded(b"\xc1", bytes.decode)
