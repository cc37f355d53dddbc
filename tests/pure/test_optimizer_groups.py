"""Groups that an optimizer is given while it trains: handed on, taken back, and never there twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is

from resilient_train.errors import LayoutError, StateError  # noqa: E402
from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402
from resilient_train.frameworks.torch.kept.optimizer_groups import parameters_of  # noqa: E402
from resilient_train.state.transfer import Span, view  # noqa: E402

pytestmark = pytest.mark.torch


class Rank:
    """A model whose optimizer begins with the last layer alone."""

    def __init__(self, make: Callable = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = make(self.model[2].parameters(), lr=1e-2)
        self.objects = Objects((self.model,), (self.optimizer,))
        self.engine = engine_for(self.objects)
        self.state, self.step = self.engine.state, self.engine.window

    def unfreeze(self, lr: float = 1e-3) -> None:
        self.optimizer.add_param_group({"params": list(self.model[0].parameters()), "lr": lr})

    def train(self, begin: int, end: int) -> None:
        for number in range(begin, end):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            self.model(batch).pow(2).mean().backward()
            self.optimizer.step()
            self.model.zero_grad()

    def give(self, other: Rank) -> None:
        sources = self.state.sources()

        def fetch(local: list[Span]) -> None:
            for there, here in zip(sources.spans, local, strict=True):
                if here.size:
                    view(here)[:] = view(there)

        other.step.forget()
        other.state.receive(sources.manifest, fetch, sources.digest)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)])
@pytest.mark.parametrize("knows", [False, True])
def test_a_replacement_gets_the_groups_of_its_source(make: Callable, *, knows: bool) -> None:
    """Whether its script has added them by then or not."""
    source, target = Rank(make), Rank(make)
    source.train(0, 2)
    source.unfreeze()
    source.train(2, 4)
    if knows:
        target.unfreeze(lr=7.0)
    source.give(target)
    assert len(target.optimizer.state) == len(source.optimizer.state) == 4
    assert [group["lr"] for group in target.optimizer.param_groups] == [1e-2, 1e-3]
    for rank in (source, target):
        rank.train(4, 7)
    assert source.state.fingerprint().digest() == target.state.fingerprint().digest()


def test_a_replacement_that_is_ahead_of_its_source_goes_back_to_it() -> None:
    source, target = Rank(), Rank()
    source.train(0, 2)
    target.unfreeze()
    source.give(target)
    assert len(target.optimizer.param_groups) == 1
    for rank in (source, target):
        rank.unfreeze()
        rank.train(2, 4)
    assert source.state.fingerprint().digest() == target.state.fingerprint().digest()


def test_groups_are_part_of_the_digest() -> None:
    """So that a group which one rank alone has is found before it has changed a parameter."""
    first, other = Rank(), Rank()
    assert first.state.fingerprint().digest() == other.state.fingerprint().digest()
    other.unfreeze()
    assert first.state.fingerprint().digest() != other.state.fingerprint().digest()


def test_a_step_that_is_cut_takes_its_group_back() -> None:
    """It will add it again."""
    rank = Rank()
    rank.train(0, 2)
    step = rank.step
    held = rank.optimizer.param_groups[0]["params"]
    for _ in range(3):
        step.begin()
        rank.unfreeze()
        step.rollback()
        assert len(rank.optimizer.param_groups) == 1
    assert rank.optimizer.param_groups[0]["params"] is held, "LBFGS, for one, holds on to the list"
    rank.unfreeze()
    step.begin()
    rank.optimizer.param_groups.pop()
    rank.optimizer.param_groups[0]["params"].append(rank.model[0].weight)
    step.rollback()
    assert [len(group["params"]) for group in rank.optimizer.param_groups] == [2, 2]


def test_an_update_that_is_undone_takes_its_group_back() -> None:
    rank = Rank()
    step = rank.step
    step.begin()
    step.save_undo()
    before = rank.state.fingerprint().digest()
    rank.unfreeze()
    rank.train(0, 1)
    step.rollback()
    assert rank.state.fingerprint().digest() == before
    assert len(rank.optimizer.state) == 0


def test_state_of_a_parameter_that_has_left_its_group_is_handed_on() -> None:
    """It may come back, and its moments count again."""
    source, target = Rank(), Rank()
    source.unfreeze()
    source.train(0, 2)
    source.optimizer.param_groups.pop()
    source.optimizer.state["count"] = {"of": 3}
    source.give(target)
    assert target.optimizer.state["count"] == {"of": 3}
    for rank in (source, target):
        assert len(parameters_of(rank.optimizer)) == 2
        rank.unfreeze()
        rank.train(2, 4)
    assert source.state.fingerprint().digest() == target.state.fingerprint().digest()


@pytest.mark.parametrize("first", [(2,), (2, 0), ()])
def test_who_goes_through_the_state_meets_it_in_the_order_of_its_source(first: tuple[int, ...]) -> None:
    """In which parameters had their first gradient. Replicas that differ in nothing else are the same."""
    source, target = Rank(), Rank()
    for rank in (source, target):
        rank.unfreeze()
    for number in first:
        source.model[number].weight.grad = torch.ones_like(source.model[number].weight)
        source.optimizer.step()
        source.model.zero_grad()
    source.train(0, 2)
    source.optimizer.state["count"] = {"of": 3}

    def order(rank: Rank) -> list[str]:
        names = {parameter: name for name, parameter in rank.model.named_parameters()}
        return [names.get(key, key) for key in rank.optimizer.state]

    for there in ([], ["2.bias"]):
        target.optimizer.state.clear()
        for parameter in (target.model.get_parameter(name) for name in there):
            target.optimizer.state[parameter] = {}
        source.give(target)
        assert order(target) == order(source)
    entries = [*target.optimizer.state.items()]
    target.optimizer.state.clear()
    target.optimizer.state.update(reversed(entries))
    assert order(target) != order(source)
    assert source.state.fingerprint().digest() == target.state.fingerprint().digest()


def test_what_has_no_name_in_another_process_is_an_error() -> None:
    rank = Rank()
    rank.optimizer.state[rank] = {}
    with pytest.raises(StateError, match="AdamW keeps state under a Rank"):
        rank.state.fingerprint().digest()
    rank = Rank()
    rank.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(StateError, match="in no registered model"):
        rank.state.fingerprint().digest()


@pytest.mark.parametrize("grown", ["source", "target"])
def test_a_model_that_grew_does_not_fit(grown: str) -> None:
    ranks = {"source": Rank(), "target": Rank()}
    ranks[grown].model.append(nn.Linear(1, 1))
    before = ranks["target"].state.fingerprint().digest()
    with pytest.raises(LayoutError, match=r"'3.bias' is (missing|only) here: .* can't grow while it trains"):
        ranks["source"].give(ranks["target"])
    assert ranks["target"].state.fingerprint().digest() == before, "nothing of it was taken up"


def test_a_buffer_of_another_shape_does_not_fit() -> None:
    """``copy_`` would have filled it by repetition."""
    source, target = Rank(), Rank()
    for rank, size in ((source, 1), (target, 4)):
        rank.model[0].register_buffer("table", torch.ones(size))
    with pytest.raises(LayoutError, match=r"buffer '0.table' is \(1,\) of torch.float32 there, and \(4,\)"):
        source.give(target)


def test_nothing_is_rolled_back_to_what_was_before_a_copy() -> None:
    """A rank that lost memory copies a later update; then the next recovery begins, and has it roll back."""
    source, target = Rank(), Rank()
    step = target.step
    step.begin()
    step.save_undo()
    source.train(0, 3)
    source.unfreeze()
    source.give(target)
    torch.rand(3)
    random = torch.get_rng_state()
    step.rollback()
    assert torch.equal(torch.get_rng_state(), random)
    assert target.state.fingerprint().digest() == source.state.fingerprint().digest()
