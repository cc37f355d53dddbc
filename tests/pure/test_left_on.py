"""What a body that was cut has left switched on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from resilient_train.frameworks.torch.kept.left_on import HungOnSince, SwitchedOn, TakenOff, forwards_of
from resilient_train.frameworks.torch.kept.module_entries import ModuleEntries


def hook(*_: object) -> None:
    pass


class Hook:
    def __call__(self, *_: object) -> None:
        pass

    def method(self, *_: object) -> None:
        pass


HANGS: list[Callable[[nn.Module, Any, Any], object]] = [
    lambda model, _, hung: model[0].register_forward_hook(hung),
    lambda model, _, hung: model.register_forward_pre_hook(hung),
    lambda model, _, hung: model.register_full_backward_hook(hung),
    lambda model, _, hung: model[0].register_full_backward_pre_hook(hung),
    lambda model, _, hung: model[0].weight.register_hook(hung),
    lambda model, _, hung: model[0].weight.register_post_accumulate_grad_hook(hung),
    lambda _, optimizer, hung: optimizer.register_step_pre_hook(hung),
    lambda _, optimizer, hung: optimizer.register_step_post_hook(hung),
]


def hung_on(model: nn.Module, optimizer: Any) -> int:
    modules = [vars(each).values() for each in (*model.modules(), optimizer)]
    tensors = [(each._backward_hooks or {}, each._post_accumulate_grad_hooks or {}) for each in model.parameters()]
    found = [held for values in (*modules, *tensors) for held in values if isinstance(held, dict)]
    return sum(type(number) is int for held in found for number in held)


@pytest.mark.parametrize("hang", HANGS)
@pytest.mark.parametrize("hung", [hook, functools.partial(hook, 1), Hook(), Hook().method])
def test_hooks_of_the_bodys_are_taken_off_and_others_stay(hang: Any, hung: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hang(model, optimizer, hung)
    before = SwitchedOn("cpu", ModuleEntries(()))
    before.put_back([model], [optimizer], called=False)
    assert hung_on(model, optimizer) == 1
    hang(model, optimizer, hung)
    handle = hang(model, optimizer, hung)
    hang(model, optimizer, nn.functional.relu)
    assert hung_on(model, optimizer) == 4
    before.put_back([model], [optimizer], called=False)
    assert hung_on(model, optimizer) == 2, "a library's hook stays"
    handle.remove()
    assert hung_on(model, optimizer) == 2


def test_switches_of_torch() -> None:
    before = SwitchedOn("cpu", ModuleEntries(()))
    was = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype()
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    before.put_back([], [], called=False)
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype()) == was
    assert torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled()


def test_what_stands_in_the_place_of_a_method() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].forward = nn.functional.relu
    before = SwitchedOn("cpu", forwards_of([model]))
    model[0].forward = hook
    model[1].forward = hook
    second = SwitchedOn("cpu", forwards_of([model]))
    before.put_back([model], [], called=False)
    assert "forward" not in vars(model[0])
    assert model[1].forward is nn.functional.relu
    second.put_back([model], [], called=False)
    assert (model[0].forward, model[1].forward) == (hook, hook)


def test_in_a_loop_of_calls_they_may_stand_in_front_of_the_call() -> None:
    """It is not run again, so nothing of it is taken back."""
    model = nn.Sequential(nn.Linear(2, 2))
    before = SwitchedOn("cpu", forwards_of([model]))
    model[0].register_forward_hook(hook)
    model[0].forward = hook
    torch.set_grad_enabled(False)
    with torch.autocast("cpu"):
        before.put_back([model], [], called=True)
        assert torch.is_autocast_enabled("cpu")
    assert hung_on(model, model) == 1
    assert model[0].forward is hook
    assert torch.is_grad_enabled()


def test_what_stays_on_for_good() -> None:
    """A process that takes a rank's place has none of it, unless its script has hung it on in front of its loop."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].register_forward_hook(hook)
    since = HungOnSince([model], [optimizer])
    assert since.names() == []
    handle = model[1].register_forward_hook(hook)
    model[0].weight.register_hook(functools.partial(hook, 1))
    model[1].forward = nn.functional.relu
    assert since.names() == ["hook", "hook", "relu"]
    handle.remove()
    del model[1].forward
    assert since.names() == ["hook"]


def test_a_hook_that_is_hung_on_once_is_told_when_the_step_that_runs_again_has_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = SwitchedOn("cpu", forwards_of([model]))
    model[0].register_forward_hook(hook)
    taken = TakenOff.of(before.put_back([model], [], called=False))
    assert taken.for_good() == ["hook"]
    model[0].register_forward_hook(hook).remove()
    assert taken.for_good() == (), "the step does so each time"
    assert before.put_back([model], [], called=False) == []
