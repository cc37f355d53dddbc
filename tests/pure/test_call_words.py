"""What two members of a group compare of a collective: what has to be the same, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from resilient_train.frameworks.torch.communication.call_words import told, word_of
from resilient_train.frameworks.torch.communication.collective_results import VERBS

Args = tuple[Any, ...]


def options(name: str, **fields: Any) -> Any:
    made = getattr(c10d, name)()
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def reduced(*shape: int, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> Args:
    return [zeros(*shape, dtype=dtype)], options("AllreduceOptions", reduceOp=op)


def rooted(kind: str, root: int, *args: Any) -> Args:
    return (*args, options(kind, rootRank=root))


def test_each_verb_has_a_word_of_its_own() -> None:
    calls = {verb: ([zeros(4)], [zeros(4)], [], []) for verb in [*VERBS, "monitored_barrier"]}
    words = {word_of(verb, args) for verb, args in calls.items()}
    assert len(words) == len(calls)
    assert 0 not in words
    assert all(word < 1 << 64 for word in words)
    assert [told(word_of(verb, args)).split()[0].rstrip(",") for verb, args in calls.items()] == [*calls]


@pytest.mark.parametrize(
    ("verb", "one", "other"),
    [
        ("allreduce", reduced(4), reduced(5)),
        ("allreduce", reduced(4), reduced(4, dtype=torch.int32)),
        ("allreduce", reduced(4), reduced(4, op=dist.ReduceOp.MAX)),
        ("broadcast", rooted("BroadcastOptions", 0, [zeros(4)]), rooted("BroadcastOptions", 1, [zeros(4)])),
        ("broadcast", rooted("BroadcastOptions", 0, [zeros(4)]), rooted("BroadcastOptions", 0, [zeros(5)])),
        ("allgather", ([[zeros(2), zeros(2)]], [zeros(2)]), ([[zeros(3), zeros(3)]], [zeros(3)])),
        ("_allgather_base", (zeros(4), zeros(2)), (zeros(6), zeros(3))),
        ("_reduce_scatter_base", (zeros(2), zeros(4)), (zeros(3), zeros(6))),
        ("gather", rooted("GatherOptions", 0, [], [zeros(2)]), rooted("GatherOptions", 1, [], [zeros(2)])),
    ],
)
def test_what_has_to_be_the_same(verb: str, one: Args, other: Args) -> None:
    assert word_of(verb, one) != word_of(verb, other)
    assert told(word_of(verb, one)) != told(word_of(verb, other))


@pytest.mark.parametrize(
    ("verb", "one", "other"),
    [
        ("allreduce", reduced(2, 2), reduced(4)),
        ("allreduce", ([zeros(4)],), reduced(4)),
        ("allreduce_coalesced", ([zeros(4), zeros(2)],), ([zeros(6)],)),
        ("broadcast", ([zeros(4)],), ([zeros(4, dtype=torch.int32)],)),
        ("allgather", ([[zeros(1), zeros(3)]], [zeros(1)]), ([[zeros(1), zeros(3)]], [zeros(3)])),
        ("gather", ([[zeros(2), zeros(2)]], [zeros(2)]), ([], [zeros(2)])),
        ("scatter", ([zeros(2)], [[zeros(2), zeros(2)]]), ([zeros(2)], [])),
        ("alltoall", ([zeros(1), zeros(2)], [zeros(1), zeros(3)]), ([zeros(3), zeros(4)], [zeros(2), zeros(4)])),
        ("alltoall_base", (zeros(3), zeros(4), [1, 2], [1, 3]), (zeros(7), zeros(6), [3, 4], [2, 4])),
    ],
)
def test_what_may_differ(verb: str, one: Args, other: Args) -> None:
    """A root passes other arguments than the others; what one gives to an all-to-all is its own affair."""
    assert word_of(verb, one) == word_of(verb, other)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: word_of("allreduce", reduced(4, op=dist.ReduceOp.AVG)), "allreduce (AVG) of 4 x float32"),
        (lambda: word_of("broadcast", rooted("BroadcastOptions", 3, [zeros(4)])), "broadcast of 16 bytes, root 3"),
        (lambda: word_of("barrier", (options("BarrierOptions"),)), "barrier"),
    ],
)
def test_for_people(make: Callable[[], int], words: str) -> None:
    assert told(make()) == words
