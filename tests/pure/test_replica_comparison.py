"""Replicas that differ are found, by all of them, at the same update, however the ranks run past one another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train._native import Board, Page
from resilient_train.protocol.difference_report import SharedObjects, alone, first_difference, rule, sentence
from resilient_train.protocol.messages import EXCHANGED, HOOKS, KEPT_BACK, Differs, Held, Shared
from resilient_train.protocol.replicas import alike, disagreeing
from resilient_train.session.comparisons.replica_comparison import Comparison, fingerprint
from resilient_train.session.peers import Peers
from resilient_train.state.arena import Arena

COMPUTE, READY = 1, 2
ARENA = Arena.create(1 << 12)


def nobody(_: int) -> int:
    raise AssertionError


class EndedError(Exception):
    """The rank waits for the end of the job."""


class Rank:
    """A Comparison, with a model that is one number."""

    def __init__(self, board: Board, rank: int, groups: Sequence[Sequence[int]] = ((0, 1, 2),), every: int = 0) -> None:
        self.board, self.rank, self.page = board, rank, Page(board, rank)
        self.model = 7
        self.made = 0
        self.told: list[Differs | Held | Shared] = []
        self.extra: list[tuple[str, str]] = []
        self.found_at = -1
        state: Any = SimpleNamespace(fingerprint=self._fingerprint, rows=self._rows)
        gradients: Any = SimpleNamespace(averages=lambda: True)
        self.link: Any = SimpleNamespace(
            rank=rank,
            look_at=-1,
            peers=Peers(board, rank, ARENA, nobody, nobody),
            channel=SimpleNamespace(send=self.told.append),
            wait_for_the_end=self._end,
        )
        self.comparison = Comparison(self.link, state, gradients, groups, every, lambda: (f"b{rank}", "host cpu"))

    def _fingerprint(self) -> Any:
        self.made += 1
        held = f"{self.model:032x}"[::-1]
        return SimpleNamespace(digest=lambda: held)

    def _rows(self, *, extra: bool = False) -> list[tuple[str, str]]:
        return self.extra if extra else [("w", str(self.model))]

    def _end(self) -> None:
        raise EndedError

    def train(self, updates: int, saved: frozenset[int], drift: tuple[int, int]) -> Iterator[None]:
        """Each yield is a moment at which another rank may run; (rank, update) is where one goes wrong."""
        for commits in range(updates):
            if commits in saved:
                self.comparison.write(commits)
            yield
            self.comparison.head(commits, shown=False)
            yield
            self.page.arrive(commits, READY, commits)
            while any(self.board.standing(rank) < (commits, READY) for rank in range(self.board.world_size)):
                yield
            yield
            try:
                self.comparison.look()
            except EndedError:
                self.found_at = commits
                return
            yield
            self.model = self.model * 31 % 1_000_003 + (drift == (self.rank, commits))
            self.page.write(commits + 1, COMPUTE, commits)


def run(seed: int, saved: frozenset[int], drift: tuple[int, int], updates: int = 24) -> list[Rank]:
    board, chance = Board.create(3), random.Random(seed)
    ranks = [Rank(board, rank) for rank in range(3)]
    going = [rank.train(updates, saved, drift) for rank in ranks]
    while going and not all(rank.found_at >= 0 for rank in ranks):
        each = chance.choice(going)
        if next(each, "over") == "over":
            going.remove(each)
    return ranks


@pytest.mark.parametrize("seed", range(20))
def test_all_find_it_at_the_next_comparison_and_nowhere_else(seed: int) -> None:
    chance = random.Random(seed)
    saved = frozenset(chance.sample(range(24), 5))
    drift = (chance.randrange(3), chance.randrange(15))
    expected = min(each for each in saved | {1, 2, 3, 4, 7, 8, 15, 16} if each > drift[1])
    ranks = run(seed, saved, drift)
    assert [rank.found_at for rank in ranks] == [expected] * 3
    differs = [told for rank in ranks for told in rank.told if type(told) is Differs]
    assert [told.commits for told in differs] == [expected] * 3


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_suspected_for_being_slow(seed: int) -> None:
    ranks = run(seed, frozenset(range(0, 24, 3)), (-1, -1))
    assert [rank.found_at for rank in ranks] == [-1] * 3


def test_it_is_looked_for_less_and_less_often() -> None:
    rank = Rank(Board.create(3), 0)
    for begin in (0, 500):
        rank.comparison.begin_at(begin)
        rank.made = 0
        for commits in range(begin, begin + 1000):
            rank.comparison.head(commits, shown=False)
            rank.comparison.look()
        assert rank.made == 18, "behind 1, 2, 4, ... 512, and 3, 7, 15, ... 511: each odd one is between two averages"


def test_and_at_least_every_so_many_updates() -> None:
    rank = Rank(Board.create(3), 0, every=32)
    rank.comparison.begin_at(7)
    found = []
    for commits in range(7, 207):
        made = rank.made
        rank.comparison.head(commits, shown=False)
        rank.comparison.look()
        found += [commits - 7] * (rank.made > made)
    assert found == [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 96, 127, 128, 160, 192]


@pytest.mark.parametrize("evaluates", [False, True])
def test_what_snapshots_show_is_looked_into_before_the_next_update(evaluates: bool) -> None:
    """Where a script has used other weights while they were copied, nothing is wrong."""
    board = Board.create(2)
    ranks = [Rank(board, rank, ((0, 1),)) for rank in (0, 1)]
    for rank in ranks:
        rank.comparison.show(5, fingerprint(f"{9 + rank.rank:032x}"[::-1]))
        rank.comparison.begin_at(2)
    for rank in ranks:
        rank.comparison.look()
        assert (rank.comparison.doubtful, rank.made) == (True, 0)
        rank.model += 0 if evaluates else rank.rank
    for rank in ranks:
        rank.comparison.head(6, shown=False)
        assert rank.made == 1
    for rank in ranks:
        if evaluates:
            rank.comparison.look()
            assert not rank.comparison.doubtful
        else:
            with pytest.raises(EndedError):
                rank.comparison.look()
            (told,) = (each for each in rank.told if type(each) is Differs)
            assert isinstance(told, Differs)
            assert (told.commits, told.since) == (6, 5), "what they held when it was seen first"
            assert told.held == tuple(fingerprint(f"{9 + each:032x}"[::-1]) for each in (0, 1))


def test_where_replicas_had_differed_they_say_what_they_hold() -> None:
    board = Board.create(2)
    for rank in (Rank(board, 0, ((0, 1),)), Rank(board, 1, ((0,), (1,)))):
        rank.link.look_at = 7
        for commits in range(4, 9):
            rank.comparison.head(commits, shown=True)
        alone = rank.rank == 1
        assert [each for each in rank.told if type(each) is not Shared] == (
            [] if alone else [Held(7, fingerprint(f"{7:032x}"[::-1]))]
        )


def test_what_was_looked_at_where_nobody_writes_counts_more() -> None:
    rank = Rank(Board.create(3), 0)
    rank.comparison.show(5, 77)
    rank.comparison.show(5, 78)
    assert (rank.comparison.write(5), rank.made) == (fingerprint(f"{7:032x}"[::-1]), 1), "a recovery has come between"
    rank.comparison.show(5, 77)
    assert rank.board.fingerprint(0, 5) != 77
    rank.comparison.look()
    rank.comparison.show(6, 0)
    assert rank.board.fingerprint(0, 6) == 0, "on a device, nothing is known"


def test_what_is_written_twice_is_made_once() -> None:
    rank = Rank(Board.create(3), 0)
    assert rank.comparison.write(4) == rank.comparison.write(4) == rank.board.fingerprint(0, 4) > 0
    rank.comparison.head(4, shown=False)
    assert rank.made == 1
    assert rank.comparison.write(4, "f" * 32) == fingerprint("f" * 32), "made anew by somebody else"
    assert rank.made == 1


def test_a_copy_is_nobodys_evidence() -> None:
    """Whether it is what its source holds, or what its dead predecessor had written."""
    board = Board.create(3)
    board.set_fingerprint(1, 4, 99)
    ranks = [Rank(board, rank) for rank in range(3)]
    assert board.fingerprint(1, 4) == 0
    for rank in ranks:
        rank.comparison.write(4)
    ranks[1].model = 8
    ranks[1].comparison.forget()
    for rank in ranks:
        rank.comparison.look()
    ranks[1].comparison.write(4)
    ranks[0].comparison.write(4)
    with pytest.raises(EndedError):
        ranks[0].comparison.look()


def test_who_has_no_replica_compares_nothing() -> None:
    rank = Rank(Board.create(3), 1, ((0, 2), (1,)))
    rank.comparison.begin_at(0)
    for commits in (1, 2, 3, 4):
        rank.comparison.head(commits, shown=False)
        assert rank.comparison.write(commits) == 0
        rank.comparison.look()
    assert rank.made == 0


def test_shards_may_differ() -> None:
    board = Board.create(4)
    groups = ((0, 2), (1, 3))
    ranks = [Rank(board, rank, groups) for rank in range(4)]
    ranks[1].model = ranks[3].model = 9
    for rank in ranks:
        rank.comparison.write(1)
    for rank in ranks:
        rank.comparison.look()


def test_a_fingerprint_is_never_nothing() -> None:
    assert fingerprint("0" * 32) == 1
    assert 0 < fingerprint("f" * 32) < 1 << 63, "what msgspec takes for an integer"


def test_what_is_not_known_proves_nothing() -> None:
    assert alike([])
    assert alike([0, 5, 5, 0])
    assert not alike([0, 5, 6])
    assert disagreeing(((0, 1), (2, 3)), {0: 4, 1: 4, 2: 5, 3: 6}) == [2, 3]
    assert disagreeing(((0, 1), (2, 3)), {0: 4, 2: 5, 3: 5}) == []


def told(*rows: tuple[str, str], averages: bool = True) -> Differs:
    return Differs(12, list(rows), averages)


def test_the_first_difference_is_named_with_who_stands_alone() -> None:
    rows = {rank: told(("a", "1"), ("b", "2" if rank == 1 else "3"), ("c", str(rank))) for rank in range(3)}
    assert first_difference({rank: dict(each.rows) for rank, each in rows.items()}) == ("b", [[0, 2], [1]])
    text = sentence((0, 1, 2), rows)
    assert "ranks [0, 1, 2] are to hold the same bits, but after update 12 'b' differs on rank 1: something" in text
    assert "began anew" not in text
    assert "since rank 2 began anew in another's place" in sentence((0, 1, 2), rows, [2])
    two = sentence((0, 1), {rank: rows[rank] for rank in (0, 1)})
    assert "'b' differs between ranks [0] and [1]" in two


def test_who_stands_against_a_majority_is_alone() -> None:
    held = {rank: told(("b", "2" if rank in (1, 3) else "3")) for rank in range(5)}
    assert alone(held) == [1, 3]
    assert alone({rank: held[rank] for rank in (0, 1)}) == alone({rank: held[rank] for rank in (0, 2)}) == []
    assert alone({rank: told(("b", str(rank))) for rank in range(3)}) == [], "each for itself"
    unaveraged = {rank: told(*each.rows, averages=rank != 1) for rank, each in held.items()}
    assert alone(unaveraged) == [], "a missing wrapper is no device's fault"


def test_what_only_one_of_them_has_differs_too() -> None:
    rows = {0: told(("a", "1"), ("moment", "5")), 1: told(("a", "1"))}
    assert "'moment' differs" in sentence((0, 1), rows)


def test_a_missing_wrapper_is_the_likely_cause() -> None:
    rows = {rank: told(("a", str(rank)), averages=False) for rank in (0, 1)}
    assert "wrap the model in DistributedDataParallel" in sentence((0, 1), rows)


@pytest.mark.parametrize("speaking", [{1}, {0, 1}])
def test_there_is_a_sentence_without_a_name(speaking: set[int]) -> None:
    """The others died over it, or what differed at the head of the update does not any more."""
    assert "after update 12 their state differs:" in sentence((0, 1), {rank: told(("a", "1")) for rank in speaking})


def test_objects_of_the_users_are_told_at_powers_of_two_behind_a_beginning() -> None:
    rank = Rank(Board.create(2), 0, groups=((0, 1),), every=3)
    for commits in range(20):
        rank.extra = [("mean", f"{commits:x}")]
        if commits == 11:
            rank.comparison.begin_at(10)
        rank.comparison.head(commits, shown=False)
    assert [each.commits for each in rank.told] == [1, 2, 4, 8, 11, 12, 14, 18]
    assert rank.told[0] == Shared(1, [("mean", "1")])


def test_nothing_is_told_where_there_is_nothing_or_nobody_to_compare_with() -> None:
    bare, alone = Rank(Board.create(2), 0, groups=((0, 1),)), Rank(Board.create(2), 0, groups=((0,), (1,)))
    alone.extra = [("mean", "1")]
    for rank in (bare, alone):
        for commits in range(9):
            rank.comparison.head(commits, shown=False)
    assert {*map(type, bare.told)} == {Shared}
    assert {len(each.rows) for each in bare.told} == {0}, "another rank may have something"
    assert alone.told == []


def test_an_object_that_differs_is_found_once_however_late_ranks_are_heard() -> None:
    objects, group = SharedObjects(), (0, 2, 3)
    alike = ("scheduler", "7")

    def heard(rank: int, commits: int, mean: str, *more: tuple[str, str]) -> list[tuple[str, list[list[int]]]]:
        return objects.heard(rank, Shared(commits, [alike, ("mean", mean), *more]), group, attempt=0)

    assert heard(0, 1, "a") == heard(2, 1, "b") == heard(1, 1, "c") == []
    assert heard(0, 2, "d") == heard(0, 4, "a") == [], "it is ahead of rank 3"
    assert heard(3, 1, "b") == [("mean", [[2, 3], [0]])]
    assert heard(2, 2, "d") == heard(3, 2, "e") == [], "it was told"
    assert heard(2, 4, "a") == heard(3, 4, "b") == []
    assert heard(0, 8, "a", ("late", "1")) == heard(2, 8, "a", ("late", "2")) == []
    assert heard(3, 8, "a") == [("late", [[0], [2]])], "who has no such object says nothing of it"


def test_an_attribute_that_one_rank_alone_has_set_differs() -> None:
    """The others have it as it was built."""
    objects = SharedObjects()
    assert objects.heard(0, Shared(1, []), (0, 1), attempt=0) == []
    found = objects.heard(1, Shared(1, [("model.0.normalizer", "a")]), (0, 1), attempt=0)
    assert found == [("model.0.normalizer", [[0], [1]])]
    assert "get_extra_state()" in rule("model.0.normalizer")
    assert "all-reduce" in rule("scheduler[0]")
    assert "rank_state=" in rule("state['own']")
    assert "what the script builds there" in rule("model.0.act" + EXCHANGED)
    assert "in front of its loop" in rule(HOOKS)
    assert "something else in that module" in rule("model.0.drop.p" + KEPT_BACK)


def test_what_a_rank_said_before_it_went_back_is_not_compared() -> None:
    objects = SharedObjects()
    heard = partial(objects.heard, group=(0, 1), attempt=0)
    assert heard(0, Shared(2, [("mean", "spoilt")])) == heard(0, Shared(4, [("mean", "spoilt")])) == []
    assert heard(0, Shared(1, [("mean", "a")])) == heard(1, Shared(1, [("mean", "a")])) == []
    for commits in (2, 4):
        assert heard(1, Shared(commits, [("mean", "right")])) == []
        assert heard(0, Shared(commits, [("mean", "right")])) == []


def test_what_was_said_before_all_began_anew_is_not_compared() -> None:
    objects = SharedObjects()
    assert objects.heard(0, Shared(1, [("mean", "spoilt")]), (0, 1), attempt=0) == []
    assert objects.heard(1, Shared(1, [("mean", "right")]), (0, 1), attempt=1) == []
    assert objects.heard(0, Shared(1, [("mean", "right")]), (0, 1), attempt=1) == []
