"""The commit rule, case by case and against its own statement."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_train.protocol.standing import Phase, Standing, standing_of
from resilient_train.protocol.verdict import Account, decide

A, C, R, U = Phase.APPLIED, Phase.COMPUTE, Phase.READY, Phase.UPDATING


def at(commits: int, phase: Phase, *, holds: bool = True) -> Account:
    return Account(Standing(commits, phase), holds)


NEW = at(0, A, holds=False)


def test_standings_are_ordered_by_progress() -> None:
    order = [Standing(c, p) for c in range(3) for p in (A, C, R, U)]
    assert order == sorted(order)
    assert standing_of((4, 2)) == Standing(4, R)


def test_died_computing_redo() -> None:
    verdict = decide({0: at(3, R), 1: at(3, C), 2: NEW}, {2: Standing(3, C)})
    assert (verdict.commits, verdict.redone, verdict.forward, verdict.empty) == (3, [0, 1], [], [2])
    assert verdict.finishers == []


def test_all_ready_and_the_dead_had_published_roll_forward() -> None:
    verdict = decide({0: at(3, R), 1: at(3, R), 2: NEW}, {2: Standing(3, R)})
    assert (verdict.commits, verdict.forward, verdict.redone) == (4, [0, 1], [])
    assert verdict.finishers == [0, 1]


def test_all_survivors_ready_but_the_dead_was_not() -> None:
    assert decide({0: at(3, R), 1: at(3, R), 2: NEW}, {2: Standing(3, C)}).commits == 3


def test_a_dead_rank_that_was_updating_decides() -> None:
    assert decide({0: at(3, R), 1: at(3, R), 2: NEW}, {2: Standing(3, U)}).commits == 4


def test_a_survivor_that_applied_decides() -> None:
    verdict = decide({0: at(4, A), 1: at(3, R), 2: NEW}, {2: Standing(3, R)})
    assert (verdict.commits, verdict.forward) == (4, [1])
    assert verdict.finishers == [0, 1]


def test_a_cut_update_is_evidence_although_its_state_is_not_usable() -> None:
    verdict = decide({0: at(3, R), 1: at(3, U, holds=False)}, {})
    assert (verdict.commits, verdict.forward, verdict.empty) == (4, [0], [1])


def test_a_rank_that_just_started_is_no_evidence() -> None:
    assert decide({0: at(3, R), 1: NEW}, {1: Standing(3, R)}).commits == 4


def test_records_from_before_a_finished_update_do_not_count_again() -> None:
    # A replacement died before it had settled: its record is still that of the update that all others have finished.
    verdict = decide({0: at(4, C), 1: at(4, C), 2: NEW}, {2: Standing(3, U)})
    assert (verdict.commits, verdict.redone) == (4, [0, 1])


def test_who_is_past_the_tail_does_not_run_it_again() -> None:
    verdict = decide({0: at(4, C), 1: at(4, A), 2: at(4, A)}, {})
    assert (verdict.commits, verdict.finishers, verdict.redone) == (4, [1, 2], [0])


def test_a_torn_rank_runs_no_tail() -> None:
    assert decide({0: at(4, A), 1: at(3, U, holds=False)}, {}).finishers == [0]


def test_nobody_holds() -> None:
    verdict = decide({0: NEW, 1: at(7, U, holds=False)}, {0: Standing(7, U)})
    assert verdict == (0, [], [0, 1], [], [], [])


def test_an_impossible_account_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="before all were ready"):
        decide({0: at(4, A), 1: at(3, C)}, {})


PHASES = st.sampled_from([C, R])


@given(st.lists(PHASES, min_size=1, max_size=5), st.lists(PHASES, max_size=3), st.integers(0, 9))
def test_before_any_update_forward_means_all_were_ready(living: list[Phase], dead: list[Phase], commits: int) -> None:
    accounts = {rank: at(commits, phase) for rank, phase in enumerate(living)}
    evidence = {len(living) + i: Standing(commits, phase) for i, phase in enumerate(dead)}
    accounts |= dict.fromkeys(evidence, NEW)
    verdict = decide(accounts, evidence)
    everybody = all(phase is R for phase in (*living, *dead))
    assert verdict.commits == commits + everybody
    assert verdict.holders == list(range(len(living)))
    assert sorted(verdict.forward + verdict.redone) == verdict.holders


@given(
    st.lists(st.sampled_from([(0, R), (0, U), (1, A), (1, C), (1, R)]), min_size=1, max_size=5),
    st.lists(st.sampled_from([(0, R), (0, U), (1, A), (1, C)]), max_size=2),
)
def test_an_update_that_anybody_entered_is_never_taken_back(living: list, dead: list) -> None:
    accounts = {r: at(c, p, holds=p is not U) for r, (c, p) in enumerate(living)}
    evidence = {len(living) + i: Standing(c, p) for i, (c, p) in enumerate(dead)}
    verdict = decide(accounts | dict.fromkeys(evidence, NEW), evidence)
    if verdict.holders:
        entered = any(s >= (0, U) for s in (*living, *dead))
        assert verdict.commits >= 1 or not entered
        assert verdict.commits <= 2
