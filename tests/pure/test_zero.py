"""ZeroRedundancyOptimizer: what is shown of it in place of the two optimizers that it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from resilient_train.errors import ConfigError, LayoutError, UsageError  # noqa: E402
from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402
from resilient_train.frameworks.torch.gradients import TorchGradients  # noqa: E402
from resilient_train.frameworks.torch.kept.optimizer_entries import put_entries  # noqa: E402
from resilient_train.frameworks.torch.kept.optimizer_groups import groups_of, regroup  # noqa: E402
from resilient_train.frameworks.torch.sharding.zero import ZeroOptimizer, ZeroParts, shown, stepping  # noqa: E402
from resilient_train.frameworks.torch.state import _check_parts, _put_together  # noqa: E402

RANK, WORLD = 1, 3


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model(world: None) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def made(model: nn.Module) -> ZeroRedundancyOptimizer:
    groups = [{"params": list(layer.parameters())} for layer in model]
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.5)


def test_one_optimizer_of_all_parameters_with_the_state_of_a_part(model: nn.Module) -> None:
    outer = made(model)
    outer.param_groups[1]["lr"] = 0.25  # a scheduler
    zero = shown(outer)
    assert isinstance(zero, ZeroOptimizer)
    assert groups_of(zero) == [list(layer.parameters()) for layer in model]
    assert [group["lr"] for group in zero.param_groups] == [0.5, 0.25]
    assert {tuple(group["betas"]) for group in zero.param_groups} == {(0.9, 0.999)}, "as behind the first step"
    model(torch.ones(2, 7)).sum().backward()
    outer.step()
    parts = ZeroParts([zero])
    mine = [each for each in model.parameters() if parts.owner(each) == RANK]
    assert 0 < len(mine) < 4
    assert set(zero.state) == set(mine)
    assert {parts.owner(each) for each in model.parameters()} <= set(range(WORLD))
    assert parts.owner(torch.ones(1)) is None


def test_others_are_shown_as_they_are(model: nn.Module) -> None:
    plain = torch.optim.AdamW(model.parameters())
    assert shown(plain) is plain
    assert stepping(plain) is plain
    assert not ZeroParts([plain])
    assert ZeroParts([plain]).replicas(0) == ()


def test_each_rank_is_alone_and_its_broadcasts_are_kept(model: nn.Module) -> None:
    zero = shown(made(model))
    parts = ZeroParts([zero])
    assert parts.replicas(zero.logged_bytes()) == ((0,), (1,), (2,))
    with pytest.raises(ConfigError, match=r"RESILIENT_TAIL_LOG_BYTES keeps \d+, .* set it to 5242880"):
        parts.replicas(zero.logged_bytes() - 1)


def test_other_groups_are_other_parts(model: nn.Module) -> None:
    zero = shown(made(model))
    held = groups_of(zero)
    regroup(zero, held)
    for wanted in (held[:1], [*held, []], [held[1], held[0]]):
        with pytest.raises(LayoutError, match="in other groups"):
            regroup(zero, wanted)
    assert groups_of(zero) == held


def test_of_what_is_saved_each_takes_its_part(model: nn.Module) -> None:
    zero = shown(made(model))
    named = dict(model.named_parameters())
    entries = {number: {"exp_avg": torch.ones_like(each)} for number, each in enumerate(named.values())}
    put_entries(zero, entries, [named])
    assert set(zero.state) == {each for each in named.values() if ZeroParts([zero]).owner(each) == RANK}


def test_who_saves_what(model: nn.Module) -> None:
    parts = ZeroParts([torch.optim.SGD(model.parameters()), shown(made(model))])
    moment = torch.ones(1)
    assert parts.saver("optimizer.1.3.exp_avg", moment) == RANK
    assert parts.saver("buffers.0.1.running_mean", moment) == 0
    weight = next(model.parameters())
    assert parts.saver("model.0.0.weight", weight) == parts.owner(weight)
    assert parts.numbers == (1,)
    for name in ("optimizer.0.3.exp_avg", "optimizer.1.word.of", "model.1.3.weight", "extra.x.1", "small"):
        assert parts.saver(name, moment) is None, name


class Heard:
    """What the driver would be told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, object]] = []

    def before_update(self, optimizer: object) -> None:
        self.said.append(("before", optimizer))

    def after_update(self, optimizer: object) -> None:
        self.said.append(("after", optimizer))

    def given(self) -> None:
        """Nothing is looked for of what flows."""


@pytest.fixture
def heard(model: nn.Module) -> Iterator[tuple[ZeroRedundancyOptimizer, Heard]]:
    outer, told = made(model), Heard()
    engine = engine_for(Objects((model,), (outer,)))
    engine.window.attach(told)
    engine.window.begin()
    yield outer, told
    engine.window.detach()


def test_the_update_is_that_of_the_part(heard: tuple[ZeroRedundancyOptimizer, Heard], model: nn.Module) -> None:
    """The broadcasts come behind it; and what is told of is what was registered."""
    outer, told = heard
    told_at_sync: list[int] = []
    sync = outer._sync_params
    outer._sync_params = lambda: (told_at_sync.append(len(told.said)), sync())
    model(torch.ones(2, 7)).sum().backward()
    outer.step()
    assert told.said == [("before", outer), ("after", outer)]
    assert told_at_sync == [2]


def test_another_group_in_the_loop(heard: tuple[ZeroRedundancyOptimizer, Heard]) -> None:
    outer, _ = heard
    outer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(UsageError, match=r"parameter of shape \(3,\) \(group 2\) that is in no registered model"):
        outer.step()


def test_another_group_of_registered_parameters(model: nn.Module) -> None:
    groups = [{"params": list(model[0].parameters())}]
    outer = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.5)
    engine = engine_for(Objects((model,), (outer,)))
    engine.window.attach(Heard())
    outer.add_param_group({"params": list(model[1].parameters())})
    with pytest.raises(UsageError, match="has got another group of parameters in the loop"):
        outer.step()
    engine.window.detach()


def test_no_gradient_stays_that_is_not_of_this_ranks_part(heard: tuple[Any, Heard], model: nn.Module) -> None:
    """What is dropped for a step that is redone; what stayed would be added to the next one's."""
    model(torch.ones(2, 7)).sum().backward()
    TorchGradients(Objects((model,), (heard[0],))).drop()
    assert all(each.grad is None for each in model.parameters())


def test_what_parts_have_in_common_must_be_the_same() -> None:
    """What is kept under a word, and all that is beside the optimizers; bytes count, not equality."""

    def part(word: float, best: float, of: int) -> dict[str, Any]:
        return {"optimizer": [{"all": word, of: {"step": 1}}], "parts": (0,), "extra": {"best": best}}

    nan = float("nan")
    _check_parts([part(0.1, nan, 0), part(0.1, nan, 1)])
    whole = _put_together([part(0.1, nan, 0), part(0.1, nan, 1)])
    assert whole["optimizer"] == [{"all": 0.1, 0: {"step": 1}, 1: {"step": 1}}]
    for other in (part(0.2, nan, 1), part(0.1, 0.0, 1)):
        with pytest.raises(LayoutError, match="not the same on all"):
            _check_parts([part(0.1, nan, 0), other])
    with pytest.raises(LayoutError, match="not the same on all"):
        _check_parts([part(0.1, 0.0, 0), part(0.1, -0.0, 1)])
