"""Whose update it is, and whose collective: what is seen of every optimizer of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is

from resilient_train.errors import UsageError  # noqa: E402
from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402
from resilient_train.frameworks.torch.window import TorchWindow  # noqa: E402

pytestmark = pytest.mark.torch


class Told:
    """Updates that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def before_update(self, optimizer: Any) -> None:
        self.told.append(f"before {type(optimizer).__name__}")

    def after_update(self, optimizer: Any) -> None:
        self.told.append(f"after {type(optimizer).__name__}")

    def given(self) -> None:
        """Nothing is looked for of what flows."""


class Communicating(torch.optim.SGD):
    """``call`` stands for a collective."""

    call: Callable[[], None] = staticmethod(lambda: None)

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        self.call()
        super().step()
        return loss


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.fixture
def registered(model: nn.Module) -> Communicating:
    model(torch.ones(1, 3)).sum().backward()
    return Communicating(model.parameters(), lr=0.1)


@pytest.fixture
def steps(model: nn.Module, registered: Communicating) -> Iterator[tuple[TorchWindow, Told]]:
    steps, told = engine_for(Objects((model,), (registered,))).window, Told()
    steps.attach(told)
    yield steps, told
    steps.detach()


def test_a_collective_in_a_step_is_the_optimizers(steps: tuple[TorchWindow, Told], registered: Communicating) -> None:
    seen, told = steps
    registered.step()
    registered.call = lambda: seen.check_collective("allreduce")
    with pytest.raises(UsageError, match=r"Communicating.step\(\) called allreduce.*undo=True does not help"):
        registered.step()
    assert told.told == ["before Communicating", "after Communicating", "before Communicating"]
    seen.begin()
    seen.check_collective("allreduce")


@pytest.mark.parametrize("named", [False, True])
def test_a_collective_in_a_closure_is_the_users(
    steps: tuple[TorchWindow, Told], registered: Communicating, *, named: bool
) -> None:
    seen, _ = steps
    calls = []

    def closure() -> int:
        seen.check_collective("allreduce")
        calls.append("called")
        return 7

    assert (registered.step(closure=closure) if named else registered.step(closure)) == 7
    assert calls == ["called"]
    registered.call = lambda: seen.check_collective("broadcast")
    with pytest.raises(UsageError, match="broadcast"):
        registered.step(closure)


def test_a_foreign_optimizer_on_a_registered_parameter_is_refused(
    steps: tuple[TorchWindow, Told], model: nn.Module
) -> None:
    _, told = steps
    before = model.weight.clone()
    foreign = torch.optim.AdamW([model.weight], lr=0.5)
    with pytest.raises(UsageError, match=r"AdamW is about to update 'weight' of the registered model.*optimizer="):
        foreign.step()
    assert torch.equal(model.weight, before)
    assert told.told == []


def test_a_foreign_optimizer_of_something_else_is_nobodys_business(
    steps: tuple[TorchWindow, Told], model: nn.Module
) -> None:
    latent = nn.Parameter(torch.ones(2))
    latent.grad = torch.ones(2)
    foreign = torch.optim.SGD([latent], lr=0.5)
    foreign.step()
    foreign.step()
    assert torch.equal(latent, torch.zeros(2))
    foreign.add_param_group({"params": [model.bias]})
    with pytest.raises(UsageError, match="'bias'"):
        foreign.step()


def test_what_a_registered_optimizer_calls_is_its_own_doing(model: nn.Module) -> None:
    """Also ``super().step()``, which has hooks of its own as soon as there is an instance of that class."""

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.step()
            return super().step(closure)

    model(torch.ones(1, 3)).sum().backward()
    outer = Outer(model.parameters(), lr=0.1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, told = engine_for(Objects((model,), (outer,))).window, Told()
    steps.attach(told)
    try:
        outer.step()
    finally:
        steps.detach()
    assert told.told == ["before Outer", "after Outer"]
    inner.step()
    assert len(told.told) == 2, "detached"
