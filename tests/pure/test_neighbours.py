"""Who is wrong, where ranks compute from each other's inputs; and what of a run of theirs can be compared."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from resilient_train.errors import StateError
from resilient_train.frameworks.roles import Given
from resilient_train.frameworks.torch.collectives import _note_message
from resilient_train.frameworks.torch.tensors.leaves import unpack
from resilient_train.frameworks.torch.tensors.shared_batch import share
from resilient_train.protocol.messages import Computed
from resilient_train.protocol.neighbours import Judgement, Round, judge, neighbour

Computes = Callable[[int, int, int], object]
"""What a rank makes of another one's inputs in the n-th run."""


def rounds(group: tuple[int, ...], computes: Computes) -> list[Round]:
    """As ranks find them: each beside what the owner of the inputs has made of them."""
    found = []
    for number, distance in enumerate((1, 2), start=1):
        owners = {rank: neighbour(group, rank, distance) for rank in group}
        came_to = {rank: computes(rank, owner, number) for rank, owner in owners.items()}
        differ = {
            rank: Computed(0, 0, 0, 0, 1, ("", str(came_to[rank])))
            for rank, owner in owners.items()
            if came_to[rank] != computes(owner, owner, 0)
        }
        found.append(Round(distance, differ))
        if not differ:
            break
    return found


def right(_rank: int, owner: int, _run: int) -> object:
    return owner


@pytest.mark.parametrize("size", range(1, 7))
def test_each_computes_from_another_one_and_all_are_computed_from(size: int) -> None:
    group = tuple(range(10, 10 + size))
    for distance in (1, 2):
        owners = [neighbour(group, rank, distance) for rank in group]
        assert sorted(owners) == list(group)
        assert size == 1 or all(owner != rank for owner, rank in zip(owners, group, strict=True))
    if size > 2:
        assert all(neighbour(group, rank, 1) != neighbour(group, rank, 2) for rank in group)


@pytest.mark.parametrize("size", range(2, 7))
def test_where_all_compute_alike_there_is_one_round(size: int) -> None:
    group = tuple(range(size))
    assert len(rounds(group, right)) == 1
    assert judge([group], rounds(group, right)) == Judgement({}, ())


@pytest.mark.parametrize("size", range(3, 8))
def test_a_device_that_always_errs_is_named(size: int) -> None:
    group = tuple(range(size))
    for wrong in group:
        told = judge([group], rounds(group, lambda rank, owner, _, w=wrong: (owner, rank == w)))
        assert told == Judgement({wrong: 3}, ())


@pytest.mark.parametrize("size", range(3, 8))
def test_a_device_that_errs_on_its_own_inputs_is_named(size: int) -> None:
    group = tuple(range(size))
    for wrong in group:
        told = judge([group], rounds(group, lambda rank, owner, _, w=wrong: (owner, rank == owner == w)))
        assert told == Judgement({wrong: 1}, ())


@pytest.mark.parametrize("size", range(2, 8))
def test_a_device_that_errs_once_is_named(size: int) -> None:
    group = tuple(range(size))
    for wrong in group:
        told = judge([group], rounds(group, lambda rank, owner, run, w=wrong: (owner, rank == w and run == 1)))
        assert told == Judgement({wrong: 1}, ())


def test_of_two_nothing_says_which_always_errs() -> None:
    for wrong in (0, 1):
        told = judge([(0, 1)], rounds((0, 1), lambda rank, owner, _, w=wrong: (owner, rank == w)))
        assert told == Judgement({}, (0, 1))


@pytest.mark.parametrize("size", range(2, 8))
def test_a_script_that_looks_at_its_rank_is_nobodys_doing(size: int) -> None:
    group = tuple(range(size))
    assert judge([group], rounds(group, lambda rank, _owner, __: rank)) == Judgement({}, group)


@pytest.mark.parametrize("size", range(5, 8))
def test_of_two_devices_that_err_no_third_one_is_named(size: int) -> None:
    """Where they stand so that both have computed what a third one has, there are three opinions."""
    group, named = tuple(range(size)), 0
    for pair in itertools.combinations(group, 2):
        told = judge([group], rounds(group, lambda rank, owner, _, p=pair: (owner, rank if rank in p else -1)))
        assert (set(told.wrong), told.unclear) in ((set(pair), ()), (set(), group))
        named += bool(told.wrong)
    assert named or size == 5


def test_groups_are_asked_apart() -> None:
    groups = ((0, 2, 4), (1, 3, 5))
    wrong = rounds(groups[0], lambda rank, owner, _: (owner, rank == 2))
    assert judge(groups, wrong) == Judgement({2: 3}, ())
    odd = rounds(groups[1], lambda rank, _owner, __: rank)
    both = [Round(a.distance, {**a.differ, **b.differ}) for a, b in zip(wrong, odd, strict=True)]
    assert judge(groups, both) == Judgement({2: 3}, groups[1])


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6.0).reshape(2, 3),
        [torch.ones(2), torch.zeros(0), {"x": torch.ones(1, dtype=torch.int8), "y": (1, 2.5, "z", None, True, b"b")}],
        (np.arange(4), np.float32(2), {3: [torch.tensor(1.5)]}),
    ],
)
def test_a_batch_is_the_very_same_thing_elsewhere(batch: Any) -> None:
    assert _same(unpack(share(batch)), batch)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


SHARED = torch.ones(4)


class Own(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    ("verb", "peer", "alone"),
    [("send", 1, None), ("recv", 1, 1), ("recv", 2, None), ("recv_anysource", 0, 1)],
)
def test_what_a_replica_has_sent_may_be_in_all_that_comes(verb: str, peer: int, alone: int | None) -> None:
    """Rank 5 holds the same as this one. What it sends is of other inputs when ranks have changed places."""
    group: Any = SimpleNamespace(rank=lambda: 0, global_ranks=(3, 5, 7))
    given = Given(frozenset({5}), ["a"])
    _note_message(given, group, verb, ([torch.ones(1)], peer, 0))
    given.digests.append("b")
    _note_message(given, group, verb, ([torch.ones(1)], peer, 0))
    assert (given.alone, given.calls) == (alone, [f"{verb} as 0"] * 2)


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (Own(x=1), "Own"),
        ([torch.ones(2, 3).t()], "laid out"),
        (torch.ones(1).expand(3), "laid out"),
        (torch.ones(2, requires_grad=True), "gradient"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2).to_sparse(), "laid out"),
        (torch.nn.Parameter(torch.ones(2)), "Parameter"),
        (np.array([object()]), "array"),
        ({"f": {1, 2}}, "set"),
        ([SHARED, {"x": (SHARED,)}], "the same memory"),
        ([SHARED, SHARED.numpy()], "the same memory"),
    ],
)
def test_a_batch_that_would_be_another_thing_elsewhere_is_not_given(batch: Any, why: str) -> None:
    with pytest.raises(StateError, match=why):
        share(batch)
