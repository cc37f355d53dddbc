"""What a script computes before its loop of results that a new process has not got: followed, and read again."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from resilient_train.frameworks.torch.communication.call_codec import bytes_of, fill_all  # noqa: E402
from resilient_train.frameworks.torch.communication.derived_values import DerivedValues  # noqa: E402
from resilient_train.frameworks.torch.tensors.storages import memory_of  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("as_in_a_fork")]


class Told:
    """What was read, in order; a second process is given the same."""

    def __init__(self, given: list[torch.Tensor] | None = None) -> None:
        self.values: list[torch.Tensor] = []
        self._given = iter(given) if given is not None else None

    def __call__(self, value: torch.Tensor, may: bool = False) -> torch.Tensor:
        kept = torch.empty(value.shape, dtype=value.dtype)
        fill_all([kept], bytes_of(value))
        self.values.append(kept)
        return value if self._given is None else next(self._given)


@pytest.fixture
def looking() -> Iterator[Callable[..., tuple[DerivedValues, torch.Tensor, Told]]]:
    """Looks from a result on, of 64 numbers, until the test ends."""
    made: list[DerivedValues] = []

    def begin(result: torch.Tensor | None = None) -> tuple[DerivedValues, torch.Tensor, Told]:
        told = Told()
        derived = DerivedValues(told)
        made.append(derived)
        result = torch.arange(64.0) if result is None else result
        derived.are_results([result], "broadcast(float32[64], rootRank 0)", "job.py:1")
        return derived, result, told

    yield begin
    for each in reversed(made):
        each.end()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.Tensor.numpy is torch._C.TensorBase.numpy


Looking = Callable[..., tuple[DerivedValues, torch.Tensor, Told]]


def is_left(derived: DerivedValues, *registered: torch.Tensor) -> str:
    """Where nothing is kept."""
    return derived.problem(lambda: memory_of(registered) or frozenset(), lambda *_: False)


def of_a_pass(result: torch.Tensor) -> Any:
    weight = torch.ones(64, requires_grad=True)
    (weight * result).sum().backward()
    return weight.grad


COMPUTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a mask": lambda result: result > 3,
    "a part of a copy": lambda result: result.clone()[2:4],
    "a row of a matrix": lambda result: (result.view(8, 8) @ torch.ones(8, 2))[0],
    "one of two": lambda result: result.view(8, 8).max(0).indices,
    "several at once": lambda result: torch._foreach_mul([torch.ones(64)], [result])[0],
    "what it was copied into": lambda result: torch.zeros(64).copy_(result),
    "what was added to": lambda result: torch.ones(64).add_(result),
    "where it was written": lambda result: torch.add(result, 1, out=torch.empty(64)),
    "what was put in by a mask": lambda result: torch.zeros(64).masked_fill_(result > 3, 1.0),
    "of other things chosen by it": lambda result: torch.ones(100)[result.long()],
    "a deep copy": copy.deepcopy,
    "an array": lambda result: result.clone().numpy(),
    "a gradient": of_a_pass,
    "in a module": lambda result: nn.ParameterList([result * 2]),
    "sparse": lambda result: result.to_sparse(),
    "in a list": lambda result: [[{"deep": result + 1}]],
}


@pytest.mark.parametrize("what", COMPUTED)
def test_what_stands_there_must_be_registered(looking: Looking, what: str) -> None:
    derived, result, _ = looking()
    computed = COMPUTED[what](result)
    problem = is_left(derived, result)
    assert "of what came of broadcast(float32[64], rootRank 0) at job.py:1" in problem
    assert f"{Path(__file__).name}:" in problem
    del computed
    assert is_left(derived, result) == ""
    assert "job.py:1 calls broadcast(float32[64], rootRank 0) before the loop, and its result can't" in is_left(derived)


class Kept:
    """What is left at the loop, by the lines that made it; a second process is given it."""

    def __init__(self) -> None:
        self.by_line: dict[str, list[bytes]] = {}

    def keep(self, line: str, data: bytes) -> bool:
        self.by_line.setdefault(line, []).append(data)
        return True

    def give(self, line: str, count: int) -> bytes | None:
        found = self.by_line.get(line)
        return found.pop(0) if found and len(found[0]) == count else None


def values_in(tree: Any) -> list[list[float]]:
    if isinstance(tree, torch.Tensor):
        return [tree.detach().flatten().tolist()]
    found = tree.values() if isinstance(tree, dict) else list(tree)
    return [numbers for each in found for numbers in values_in(each)]


@pytest.mark.parametrize("what", [each for each in COMPUTED if each not in {"an array", "sparse"}])
def test_what_is_small_is_given_again(what: str) -> None:
    kept, left = Kept(), list[Any]()
    for number in (1, 2):
        derived, result = DerivedValues(Told()), torch.arange(64.0) + number
        derived.are_results([result], "broadcast(float32[64], rootRank 0)", "job.py:1")
        left.append(COMPUTED[what](result))
        derived.end()
        del result
        if number == 1:
            assert derived.problem(frozenset, kept.keep) == ""
        else:
            assert derived.give(frozenset, kept.give) == ""
    assert values_in(left[0]) == values_in(left[1])
    assert not any(kept.by_line.values())


def test_what_can_not_be_given_again_is_refused(looking: Looking) -> None:
    """Too large, not torch's own, or no one piece; and in a process in which it is something else."""
    kept = Kept()
    array = np.zeros(64, dtype=np.float32)
    makes: list[Callable[[torch.Tensor], Any]] = [
        lambda each: each.repeat(300),
        lambda each: torch.from_numpy(array).copy_(each),
        lambda each: each.to_sparse(),
    ]
    for make in makes:
        derived, result, _ = looking()
        left = make(result)
        registered = memory_of([result])
        assert registered is not None
        assert "computes something before the loop of" in derived.problem(lambda held=registered: held, kept.keep)
        assert f"{Path(__file__).name}:" in derived.give(lambda held=registered: held, kept.give)
        del left
    assert kept.by_line == {}


def test_a_pass_is_looked_at_from_its_beginning() -> None:
    """What begins within it is over when it is."""
    told, real = Told(), torch.autograd._engine_run_backward
    derived = DerivedValues(told)
    derived.look_from_next_pass()
    derived.look_from_next_pass()
    weight, gradients = torch.ones(3, requires_grad=True), list[torch.Tensor]()

    def average(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        derived.are_as_at_first()  # as it is when a process hears here that it is not the first one
        derived.are_results([gradient], "allreduce(float32[3])", "job.py:1")
        gradients.append(gradient)
        return gradient

    weight.register_hook(average)
    assert torch._C._len_torch_dispatch_stack() == 0
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.norm().item() > 0
    assert [each.item() for each in told.values] == [weight.grad.norm().item()], "read by the test, and told once more"
    derived.end()
    (weight * 2).sum().backward()
    assert torch.autograd._engine_run_backward is real
    assert torch._C._len_torch_dispatch_stack() == 0


def test_what_may_be_as_it_was() -> None:
    """A standby knows that when it is a rank. What comes of something else as well is another matter."""
    derived = DerivedValues(Told())
    weights, gradient = torch.ones(3), torch.ones(3)
    derived.are_results([weights], "broadcast(float32[3])", "job.py:1", may=True)
    of_both = weights * 2
    derived.are_results([gradient], "allreduce(float32[3])", "job.py:2")
    derived.are_results([gradient], "broadcast(float32[3])", "job.py:3", may=True)
    of_both.add_(gradient)
    of_one = weights + 1
    derived.are_as_at_first()
    left = {origin.called: derived for _, origin in derived._there(frozenset)}
    assert set(left) == {"job.py:2"}
    assert len(derived._there(frozenset)) == 2
    derived.end()
    del of_one, of_both


def test_views_are_the_same_memory(looking: Looking) -> None:
    derived, result, _ = looking()
    kept = result[3:], result.view(8, 8).t(), nn.Parameter(result), result.detach()
    assert is_left(derived, result) == ""
    del result
    assert is_left(derived, kept[0]) == ""
    assert "is still there" in is_left(derived)


NOT_COMPUTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "only its form": lambda result: [
        *(torch.zeros_like(result), torch.empty_like(result), torch.randn_like(result), result.new_zeros(3)),
        *(result.new_empty(3), torch.full_like(result, 2.0), torch.ones_like(result)),
    ],
    "written anew": lambda result: (result * 2).copy_(torch.ones(64)),
    "zeros in its place": lambda result: (result * 2).zero_(),
    "drawn in its place": lambda result: nn.init.normal_(result * 2),
    "written out to": lambda result: torch.add(torch.ones(64), 1, out=result * 2),
    "gradients of zeros": lambda result: torch._foreach_zero_(kept := [result * 2]) or kept,
    "without memory": lambda result: result.to("meta"),
    "its size": lambda result: (result.shape, result.numel(), len(result)),
    "other things": lambda _: torch.ones(4) + 1,
    "another tensor in its place": lambda result: torch.ones(3).set_(torch.ones(4)),
}


@pytest.mark.parametrize("what", NOT_COMPUTED)
def test_what_does_not_depend_on_it_is_no_matter(looking: Looking, what: str) -> None:
    derived, result, told = looking()
    kept = NOT_COMPUTED[what](result)
    assert is_left(derived, result) == ""
    assert kept is not None
    assert told.values == []


def test_a_part_that_is_written_anew_leaves_the_rest(looking: Looking) -> None:
    derived, result, _ = looking()
    doubled = result * 2
    doubled[:10] = 0.0
    assert "computes something" in is_left(derived, result)
    doubled.zero_()
    assert is_left(derived, result) == ""


def test_a_result_that_is_given_again_is_no_matter_any_more(looking: Looking) -> None:
    derived, result, told = looking()
    total = result.sum()
    derived.are_given([total])
    assert total.item() == 2016.0
    assert told.values == []
    assert is_left(derived, result) == ""


def test_room_of_torchs_is_no_matter(looking: Looking) -> None:
    """Buckets, in which a wrapper puts gradients together."""
    derived, result, _ = looking()
    bucket = torch.zeros(64)
    derived.are_room([bucket])
    bucket.copy_(result)
    assert is_left(derived, result) == ""


READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda values: values.sum().item(),
    "another": lambda values: float(values.max()) + int(values[3]),
    "a decision": lambda values: 1 if (values > 100).any() else 0,
    "whether it is finite": lambda values: all(torch.isfinite(each).all() for each in (values, values * 2)),
    "whether two are the same": lambda values: torch.equal(values, torch.arange(64.0)),
    "nearly": lambda values: torch.allclose(values, torch.arange(64.0)),
    "a list": lambda values: values.tolist(),
    "a list of a part": lambda values: (values[3:7] * 2).tolist(),
    "an array": lambda values: values.numpy().sum(),
    "another library's": lambda values: np.from_dlpack(values).sum(),
    "how many": lambda values: len(values[values > 40]),
    "where": lambda values: [each.tolist() for each in torch.where(values > 40)],
    "how many different ones": lambda values: values.long().div(10, rounding_mode="floor").unique().shape,
    "for people": lambda values: f"{values[7]:.3f}",
    "a norm": lambda values: torch.nn.utils.get_total_norm([values]).item(),
    "in a loop": lambda values: sum(1 for each in values if each > 60),
    "a complex one": lambda values: (values[1] + 2j).item(),
}


@pytest.mark.parametrize("what", READ)
def test_what_is_read_is_read_again(looking: Looking, what: str) -> None:
    derived, result, told = looking()
    first = READ[what](result)
    derived.end()
    for wrong in (torch.full((64,), torch.nan), torch.zeros(64), torch.arange(64.0).flip(0)):
        again = Told(told.values)
        answered = DerivedValues(again)
        answered.are_results([wrong], "broadcast", "job.py:1")
        try:
            assert READ[what](wrong) == first
            assert len(again.values) == len(told.values) > 0
        finally:
            answered.end()


def test_a_mode_of_the_scripts_is_left_as_it_was(looking: Looking) -> None:
    """It takes away the uppermost one when it ends, whichever that is."""

    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Counts() as counts:
        derived, result, told = looking()
        assert (result + 1).sum().item() == 2080.0
        assert (counts.calls, len(told.values)) == (4, 1)
    assert result.sum().item() == 2016.0
    assert (counts.calls, len(told.values)) == (4, 2)
    with counts:
        derived.end()
        assert result.sum().item() == 2016.0
    assert (counts.calls, len(told.values)) == (6, 2)


def test_many_results_that_are_gone_take_no_room(looking: Looking) -> None:
    derived, result, _ = looking()
    for _ in range(5000):
        result + 1
    assert len(derived._origins) < 2500


def test_other_threads_are_not_looked_at(looking: Looking) -> None:
    _, result, told = looking()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend((result.sum().item(), result.tolist())))
    thread.start()
    thread.join()
    assert len(found) == 2
    assert told.values == []


def test_what_a_process_has_not_got_is_no_number() -> None:
    numbers = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)]
    DerivedValues(Told()).are_missing(numbers)
    assert [bool(each.isnan().all()) for each in numbers] == [True, True, False]
    assert numbers[2].tolist() == [0, 0], "a place in a table"


NOT_OF_NAN: dict[str, Callable[[torch.Tensor], Any]] = {
    "parts": lambda values: torch.linalg.svd(values.view(8, 8), full_matrices=False)[1],
    "a root": lambda values: torch.linalg.cholesky(values.view(8, 8) @ values.view(8, 8).T + torch.eye(8)),
    "a choice": lambda values: torch.multinomial(values.abs() + 1, 5),
    "draws": lambda values: torch.bernoulli(values.clamp(0, 1)),
}


@pytest.mark.parametrize("what", NOT_OF_NAN)
def test_an_operation_that_does_not_take_nan_is_done_all_the_same(looking: Looking, what: str) -> None:
    """What it gives goes into registered tensors, whose content comes from a replica."""
    derived, result, _ = looking(torch.randn(64))
    first = NOT_OF_NAN[what](result)
    derived.are_missing([result])
    derived.are_results([result], "broadcast(float32[64], rootRank 0)", "job.py:1")
    again = NOT_OF_NAN[what](result)
    assert again.shape == first.shape
    assert again.isnan().any() or not again.is_floating_point()
    with pytest.raises(RuntimeError):
        torch.linalg.cholesky(torch.zeros(2, 2))
    with pytest.raises(RuntimeError):
        result.view(8, 8) @ torch.ones(3, 3)


@pytest.mark.parametrize("by", ["array", "buffer", "copy"])
def test_memory_that_is_not_torchs_own_may_be_there_still(looking: Looking, by: str) -> None:
    array = np.arange(64, dtype=np.float32)
    result = torch.from_numpy(array) if by == "array" else torch.frombuffer(array, dtype=torch.float32)
    derived, result, _ = looking(torch.arange(64.0) if by == "copy" else result)
    if by == "copy":
        torch.from_numpy(array).copy_(result)
    assert "may still be there (its memory is an array's" in is_left(derived, *([result] if by == "copy" else []))
    del result
    assert "may still be there (its memory is an array's" in is_left(derived)


def test_of_a_result_in_another_thread_nobody_sees_what_becomes(looking: Looking) -> None:
    """So it must lie in registered memory, also when torch has left it."""
    for derived in (DerivedValues(Told()), looking()[0]):
        result = torch.arange(64.0)
        thread = threading.Thread(target=derived.are_results, args=([result], "broadcast(float32[64])", "job.py:7"))
        thread.start()
        thread.join()
        is_left_of = [each for _, each in derived._there(frozenset) if each.called == "job.py:7"]
        del result
        assert len(is_left_of) == 1
        assert [each for _, each in derived._there(frozenset) if each.called == "job.py:7"] == is_left_of
    assert DerivedValues(Told())._there(frozenset) == []


def test_a_pass_in_another_thread_belongs_to_who_began_it(looking: Looking) -> None:
    """On a device torch computes it in a thread of its own: parts are gathered there."""
    derived, result, _ = looking()
    weight = torch.ones(64, requires_grad=True)

    def gather(gradient: torch.Tensor) -> None:
        found.append(torch.arange(64.0))
        derived._thread += 1  # as if it were another one
        derived.are_results(found, "allgather(float32[64])", "job.py:8")
        derived._thread -= 1

    found: list[torch.Tensor] = []
    weight.register_hook(gather)
    weight.sum().backward()
    assert len(found) == 1
    assert "job.py:8 calls allgather" in is_left(derived, result)
    found.clear()
    assert is_left(derived, result) == ""
