"""Which saved states count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train.launch.agent.trusted_states import TrustedStates
from resilient_train.protocol.messages import Source


def held(*by_rank: tuple[int, ...], accumulate: int = 2) -> list[Any]:
    """What a holder has of each rank: snapshots of these updates."""
    snapshot = lambda commits: SimpleNamespace(commits=commits, step=commits * accumulate, world=len(by_rank))
    return [SimpleNamespace(rank=rank, snapshots=[*map(snapshot, each)]) for rank, each in enumerate(by_rank)]


def test_what_all_ranks_hold_and_nobody_has_refused() -> None:
    states = TrustedStates(2, keep=2)
    stores = held((7, 6, 5), (6, 5))
    assert states.newest_of(stores) == Source("memory", 6)
    states.refuse(Source("memory", 6), whole=False, passing=False, attempt=0)
    assert states.newest_of(stores) == Source("memory", 5)
    states.refuse(Source("memory", 5), whole=True, passing=False, attempt=0)
    assert states.newest_of(stores) is None
    assert states.why_not_anew().startswith("nothing of it is on storage")


def test_what_cannot_be_reached_is_tried_again() -> None:
    """Several ranks of one attempt may say so."""
    states, source = TrustedStates(2, keep=2), Source("memory", 6)
    stores = held((6, 5), (6, 5))
    for attempt in (0, 0, 1):
        states.refuse(source, whole=False, passing=True, attempt=attempt)
        assert states.newest_of(stores) == source
    states.equal(7, 14)
    for attempt in (2, 3):
        states.refuse(source, whole=False, passing=True, attempt=attempt)
        assert states.newest_of(stores) == source
    states.refuse(source, whole=False, passing=True, attempt=4)
    assert states.newest_of(stores) == Source("memory", 5)


def test_what_all_have_begun_from_in_memory_is_known_to_be_there() -> None:
    states = TrustedStates(2, keep=2)
    states.begun_with(states.newest_of(held((6, 5), (6, 5))))
    assert states.kept_before(20) == 12
    assert states.kept_before(11) == -1


def test_what_the_launcher_before_knew_to_be_wrong() -> None:
    states, stores = TrustedStates(2, keep=2), held((6, 5), (6, 5))
    states.recall(11, None)
    assert (states.newest_of(stores), states.going_back) == (Source("memory", 5), False)
    states.recall(None, 11)
    assert states.newest_of(stores) == Source("memory", 6)


def test_trust_that_is_taken_comes_back_with_a_new_snapshot() -> None:
    states, stores = TrustedStates(2, keep=2), held((6, 5), (6, 5))
    states.equal(5, 10)
    states.distrust(11)
    assert (states.newest_of(stores), states.going_back) == (Source("memory", 5), True)
    assert "before step 11" in states.why_not_anew()
    states.equal(6, 12)
    assert states.newest_of(stores) == Source("memory", 6)
    assert states.wrong_stored == 11, "until that is set aside"
    assert "before step 11" in states.why_not_anew(), "it may be all that is left"
    states.wrong_stored = None
    assert not states.why_not_anew()


def test_a_snapshot_of_a_history_that_is_left_hides_no_newer_one() -> None:
    """All began again from an older state. What was kept behind that is taken out of memory."""
    states = TrustedStates(2, keep=2)
    for step in (20, 22, 11):
        states.equal(step, step)
    assert states.kept_before(25) == 11
    assert states.kept_before(10) == -1
    states.memory_lost()
    assert states.kept_before(25) == -1


def test_checkpoints_that_are_known() -> None:
    states = TrustedStates(1, keep=2)
    for step, nan in ((10, False), (12, True), (14, True)):
        states.stored(step, nan=nan)
    assert [states.stored_before(step) for step in (9, 10, 11, 12)] == [False, True, True, True]
    states.distrust(13)
    states.stored(16, nan=False)  # it was on its way
    assert (states.newest_without_nan, states.stored_before(11), states.stored_before(13)) == (10, True, True)
    states.distrust(9)
    assert not states.stored_before(9)
    assert states.newest_without_nan == -1
    states.begun_with(Source("storage", 4, "checkpoints/step_8"))
    assert states.stored_before(9)
    states.refuse(Source("storage", 4, "checkpoints/step_8"), whole=False, passing=False, attempt=0)
    assert not states.stored_before(9)


def test_the_newest_from_before_replicas_agreed_stays() -> None:
    states = TrustedStates(1, keep=1)
    states.stored(10, nan=True)
    states.agreed(12, 12)
    for step in (12, 14, 16):  # the first one was on its way
        states.stored(step, nan=True)
    assert [states.stored_before(step, one_more=True) for step in (11, 12)] == [False, True]
    states.distrust(11)
    assert not states.stored_before(12)
    states.begun_with(Source("storage", 9, "checkpoints/step_9"), [9, 10])
    assert (states.agreed_commits, states.agreed_step) == (9, 9), "the rest is of a history that is left"
    states.stored(11, nan=False)
    assert states.stored_before(9)
    states.refuse(Source("storage", 9, "checkpoints/step_9"), whole=False, passing=False, attempt=0)
    assert not states.stored_before(9)


@pytest.mark.parametrize(
    ("source", "agreed", "there"),
    [
        (Source("storage", 14, "checkpoints/step_14"), (12, 12), True),
        (Source("memory", 13), (12, 12), True),
        (Source("storage", 8, "checkpoints/step_8"), (8, 8), True),
        (Source("memory", 11), (-1, -1), False),
        (None, (-1, -1), False),
    ],
)
def test_what_replicas_agreed_on_in_a_run_before(
    source: Source | None, agreed: tuple[int, int], *, there: bool
) -> None:
    states = TrustedStates(1, keep=1)
    states.agreed(12, 12)
    states.begun_with(source, [8, 14])
    assert (states.agreed_commits, states.agreed_step) == agreed
    states.stored(16, nan=True)
    assert states.stored_before(12) == there


def test_what_all_begin_with_is_no_second_checkpoint() -> None:
    states = TrustedStates(1, keep=2)
    for step in (10, 14):
        states.stored(step, nan=False)
    states.begun_with(Source("storage", 14, "checkpoints/step_14"))
    assert states.stored_before(11)
    assert not states.stored_before(11, one_more=True)
    assert states.stored_before(14, one_more=True)
