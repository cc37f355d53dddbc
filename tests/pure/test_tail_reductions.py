"""What of a reduction behind the update can be added up by another library than the group's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is

from resilient_train.frameworks.torch.communication.clique import Clique  # noqa: E402
from resilient_train.frameworks.torch.communication.tail_collectives import _divide, _in_any_order, _summed  # noqa: E402


def calls(operation: Any, *given: Any) -> list[tuple[Any, ...]]:
    found = []
    for each in given:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        found.append(([each.clone()], options))
    return found


HALF = torch.tensor([0.5])
WHOLE = torch.tensor([3])


@pytest.mark.parametrize(
    ("operation", "given", "same"),
    [
        (dist.ReduceOp.SUM, [HALF] * 3, False),
        (dist.ReduceOp.AVG, [HALF] * 3, False),
        (dist.ReduceOp.PRODUCT, [HALF] * 3, False),
        (dist.ReduceOp.SUM, [HALF] * 2, True),  # two are added up in one way
        (dist.ReduceOp.AVG, [HALF] * 2, True),
        (dist.ReduceOp.MAX, [HALF] * 3, True),
        (dist.ReduceOp.SUM, [WHOLE] * 3, True),
    ],
)
def test_the_order_matters_to_sums_of_three(operation: Any, given: list[Any], same: bool) -> None:
    assert _in_any_order("allreduce", calls(operation, *given)) is same


def test_gloo_averages_by_adding_up() -> None:
    made = calls(dist.ReduceOp.AVG, torch.tensor([1.0, 6.0]), torch.tensor([2.0, 0.5]))
    assert all([_summed(args) for args in made])  # noqa: C419 - each is changed
    clique = Clique(2)
    try:
        clique.run("allreduce", made)
    finally:
        clique.close()
    assert [each[0][0].tolist() for each in made] == [[3.0, 6.5]] * 2
    assert not any(_summed(args) for args in made)


@pytest.mark.parametrize(
    ("sums", "averages"), [(torch.tensor([(1 << 40) + 1, -3]), [1 << 39, -1]), (torch.tensor([3.0, -1.0]), [1.5, -0.5])]
)
def test_an_average_is_of_the_same_kind(sums: Any, averages: list[float]) -> None:
    _divide(sums, 2)
    assert sums.tolist() == averages
