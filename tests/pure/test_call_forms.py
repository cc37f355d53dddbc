"""A group's methods take a call in two forms; inside there is one, which names the root and the operation."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch._C import _distributed_c10d as c10d  # noqa: E402 - likewise

from resilient_train.errors import UsageError  # noqa: E402 - likewise
from resilient_train.frameworks.torch.communication.call_codec import call_of, check_repeatable, header_of  # noqa: E402 - likewise
from resilient_train.frameworks.torch.communication.call_forms import in_places  # noqa: E402 - likewise
from resilient_train.frameworks.torch.communication.collective_results import VERBS  # noqa: E402 - likewise

ONE, TWO = torch.ones(2), torch.zeros(2)


def with_root(kind: str, root: int) -> Any:
    options = getattr(c10d, kind)()
    options.rootRank = root
    return options


def seen(args: tuple[Any, ...]) -> list[Any]:
    """Options as what they say."""
    return [
        (type(arg).__name__, getattr(arg, "rootRank", None), getattr(arg, "reduceOp", None) and arg.reduceOp.op)
        if type(arg).__name__.endswith("Options")
        else arg
        for arg in args
    ]


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
CASES = [
    ("allreduce", (ONE,), {}, [[ONE]]),
    ("allreduce", (ONE, MAX), {}, [[ONE], ("AllreduceOptions", None, MAX)]),
    ("allreduce", (), {"tensors": [ONE], "op": MAX}, [[ONE], ("AllreduceOptions", None, MAX)]),
    ("broadcast", (ONE, 3), {}, [[ONE], ("BroadcastOptions", 3, None)]),
    ("broadcast", (ONE,), {"root": 2}, [[ONE], ("BroadcastOptions", 2, None)]),
    ("broadcast", ([ONE],), {"opts": with_root("BroadcastOptions", 1)}, [[ONE], ("BroadcastOptions", 1, None)]),
    ("reduce", (ONE, 1, MAX), {}, [[ONE], ("ReduceOptions", 1, MAX)]),
    ("gather", ([ONE, TWO], ONE, 1), {}, [[[ONE, TWO]], [ONE], ("GatherOptions", 1, None)]),
    ("gather", ([], ONE, 1), {}, [[], [ONE], ("GatherOptions", 1, None)]),
    ("scatter", (ONE, [ONE, TWO]), {"root": 1}, [[ONE], [[ONE, TWO]], ("ScatterOptions", 1, None)]),
    ("scatter", (ONE, [], 1), {}, [[ONE], [], ("ScatterOptions", 1, None)]),
    ("allgather", ([ONE, TWO], ONE), {}, [[[ONE, TWO]], [ONE]]),
    ("reduce_scatter", (ONE, [ONE, TWO], MAX), {}, [[ONE], [[ONE, TWO]], ("ReduceScatterOptions", None, MAX)]),
    ("all_gather_single", (), {"input": ONE, "output": TWO}, [TWO, ONE]),
    ("barrier", (), {}, []),
    ("barrier", (), {"timeout": timedelta(seconds=3)}, [("BarrierOptions", None, None)]),
    ("send", ([ONE], 1, 7), {}, [[ONE], 1, 7]),
    ("recv", ([ONE],), {"tag": 7, "srcRank": 1}, [[ONE], 1, 7]),
]


@pytest.mark.parametrize(("verb", "args", "kwargs", "expected"), CASES)
def test_one_form(verb: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[Any]) -> None:
    found = seen(in_places(verb, args, kwargs))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one is other or one == other
    if verb in VERBS:
        verb_again, args_again = call_of(header_of(verb, in_places(verb, args, kwargs)))
        assert verb_again == verb
        assert [each for each in seen(args_again) if isinstance(each, tuple)] == [
            each for each in expected if isinstance(each, tuple)
        ]


def test_torchs_own_calls_stay_as_they_are() -> None:
    args = ([ONE], c10d.AllreduceOptions())
    assert in_places("allreduce", args, {}) is args


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: in_places("broadcast", (ONE, "two"), {}), "with a str that it does not take"),
        (lambda: in_places("all_gather_single", (ONE,), {}), "called with 1 arguments where it takes 2"),
        (lambda: check_repeatable("allreduce", ([torch.ones(1, 4).expand(3, 4)],)), "pass tensor.contiguous"),
        (lambda: check_repeatable("broadcast", ([torch.ones(6, 4)[::2]],)), "pass tensor.contiguous"),
        (lambda: check_repeatable("allreduce", ([torch.ones(4).to_sparse()],)), "torch.sparse_coo"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        call()


def test_a_factor_is_refused() -> None:
    options = c10d.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(UsageError, match="PREMUL_SUM"):
        check_repeatable("allreduce", ([ONE], options))
