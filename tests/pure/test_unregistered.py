"""Parameters that are not registered: which there are, whether they change, and whether they are the same ones."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is

from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.checks.unregistered import Unregistered  # noqa: E402
from resilient_train.frameworks.torch.tensors.storages import registered  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("as_in_a_fork")]


class Odd(nn.Module):
    """Of a class that nothing else here has."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50))


def of(*models: nn.Module, state: dict[str, Any] | None = None) -> Unregistered:
    found = Unregistered(models)
    found.begin(lambda: registered(Objects(models, (), extra=state or {})))
    return found


def odd(found: Unregistered) -> set[str]:
    """Other tests' modules may not have been collected yet."""
    return {each.strange.told for each in found._held if each.strange.kind == "Odd"}


NAMES = {f"parameter 'inner.{name}' of Odd" for name in ("0.weight", "0.bias", "1.weight", "1.bias")} | {
    f"buffer 'inner.1.{name}' of Odd" for name in ("running_mean", "running_var", "num_batches_tracked")
}


def test_what_lies_in_registered_memory_is_registered() -> None:
    model = Odd()
    assert odd(of()) == NAMES
    assert odd(of(model)) == set()
    assert odd(of(nn.Sequential(model))) == set()
    assert odd(of(state={"odd": model})) == set()
    assert odd(of(model.inner[0])) == {name for name in NAMES if "inner.1" in name}
    beside = copy.deepcopy(model)
    assert odd(of(model)) == NAMES
    beside.inner = model.inner
    assert odd(of(model)) == set(), "it shares all of it"
    with torch.device("meta"):
        bare = Odd()
    unborn = Odd()
    unborn.inner = nn.Sequential(nn.LazyLinear(50), nn.LazyBatchNorm1d())
    assert odd(of(model)) == {"buffer 'inner.1.num_batches_tracked' of Odd"}, (
        "of the others there is nothing to bring back"
    )
    assert odd(of(model, unborn)) == set()
    del bare


class Publishes(nn.Module):
    """Has a module that is no child of its own, and gives its state beside its own."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def get_extra_state(self) -> Any:
        return self.others[0].state_dict()

    def set_extra_state(self, state: Any) -> None:
        self.others[0].load_state_dict(state)


def test_what_a_module_publishes_is_registered() -> None:
    model = Odd()
    assert odd(of(Publishes(model))) == set()
    assert odd(of(nn.Sequential(Publishes(model)))) == set()
    assert odd(of(Odd(), Publishes(model.inner))) == set()


@pytest.mark.parametrize("write", ["torch", "data", "last"])
def test_a_change_is_seen_however_it_is_written(write: str) -> None:
    model = Odd()
    found = of()
    assert found.changed() == ()
    with torch.no_grad():
        if write == "torch":
            model.inner[0].weight.lerp_(torch.ones(50, 40), 0.1)
        elif write == "data":
            model.inner[0].weight.data.mul_(0.9)
        else:
            model.inner[0].weight[-1, -1] += 1
    assert found.changed() == ("parameter 'inner.0.weight' of Odd",)
    assert found.stands_here("parameter 'inner.0.weight' of Odd")
    assert not found.stands_here("parameter 'inner.0.weight' of Other")
    with torch.no_grad():
        model.inner[0].weight.zero_()
    assert found.changed(), "once seen it stays so"


@pytest.mark.parametrize("how", ["half", "other", "loaded", "none", "buffer", "kind"])
def test_another_one_in_its_place_is_a_change(how: str) -> None:
    class Own(nn.Parameter):
        pass

    model, name = Odd(), "parameter 'inner.0.weight' of Odd"
    if how == "kind":
        model.inner[0].weight = Own(torch.ones(50, 40))
    found = of()
    assert found.changed() == ()
    if how == "half":
        model.half()
    elif how == "other":
        model.inner[0].weight = nn.Parameter(torch.zeros(50, 40))
    elif how == "loaded":
        model.load_state_dict(Odd(7).state_dict(), assign=True)
    elif how == "none":
        model.inner[0].weight = None
    elif how == "buffer":
        model.inner[1].running_mean.add_(1)
        name = "buffer 'inner.1.running_mean' of Odd"
    else:
        model.inner[0].weight.data.mul_(2)
    assert name in found.changed()


def test_what_is_made_before_the_first_call_counts_from_then() -> None:
    early = Odd()
    found = of()
    with torch.no_grad():
        early.inner[0].bias.add_(1)
    late = Odd(1)
    late.inner[0].weight.data.add_(1)
    found.go_on(frozenset)
    assert {each for each in found.changed() if each.endswith("of Odd")} == {"parameter 'inner.0.bias' of Odd"}
    late.inner[0].weight.data.add_(1)
    assert "parameter 'inner.0.weight' of Odd" in found.changed()
    held = len(found._held)
    found.go_on(frozenset)
    assert len(found._held) == held


def test_what_is_no_change() -> None:
    """A cache; memory that FSDP takes away; a module that is gone."""
    model, gone = Odd(), Odd()
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    found = of()
    model.cache.add_(1)
    model.inner[1].weight.untyped_storage().resize_(0)
    del gone
    assert found.changed() == ()


def test_most_of_the_looks_while_it_trains_cost_nothing() -> None:
    model = Odd()
    found = of()
    looked = []
    for _ in range(100):
        before = model.inner[0].weight.detach().clone()
        model.inner[0].weight.data.add_(1)
        looked.append(bool(found.changed(sometimes=True)))
        model.inner[0].weight.data.copy_(before)
        found._changed = ()
    assert [n + 1 for n, told in enumerate(looked) if told] == [1, 2, 4, 8, 16, 32, 64, 96]
    assert found.changed() == ()
    model.inner[0].weight.data.add_(1)
    assert found.changed(), "one that counts looks"


def test_another_process_has_the_same_or_it_is_told() -> None:
    model = Odd()
    first = of().packed()
    assert of().difference(first) == ""
    assert of().difference(b"") == "", "there was no record"
    del model
    again = Odd()
    assert of().difference(first) == ""
    torch.nn.init.ones_(again.inner[0].bias)
    told = "parameter 'inner.0.bias' of Odd, which is not registered, has other values"
    assert of().difference(first) == told
    del again
    assert of().difference(first) == "", "one of them may be garbage that was not collected yet"
    two = Odd(), Odd(1)
    assert of().difference(first) == "", "more of them"
    second = of().packed()
    del two
    three = Odd(1), Odd()
    assert of().difference(second) == "", "in another order"
    del three
    four = Odd(1), Odd(2)
    assert "which is not registered, has other values" in of().difference(second)
    del four


def test_objects_are_not_asked_for_their_state_without_need() -> None:
    model = Odd()
    gc.collect()
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]  # not every object can be asked
    others = {id(each) for each in modules} - set(map(id, model.modules()))
    found, asked = Unregistered([model, *(each for each in modules if id(each) in others)]), list[None]()

    def registered_memory() -> frozenset[Any]:
        asked.append(None)
        return frozenset()

    found.begin(registered_memory)
    assert asked == []


def test_a_tensor_may_be_swapped() -> None:
    """torch refuses that where somebody has a weak reference to one."""
    model, other = Odd(), Odd(3)
    found = of()
    torch.utils.swap_tensors(model.inner[0].weight, other.inner[0].weight)
    assert found.changed()


def test_what_a_script_has_frozen_is_found() -> None:
    model, frozen = Odd(), gc.get_freeze_count()
    gc.freeze()
    try:
        found = Unregistered()
        found.begin(frozenset)
        assert odd(found) == NAMES
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
    del model


def test_a_module_that_was_not_built_is_no_module() -> None:
    bare = Odd.__new__(Odd)
    assert odd(of()) == set()
    del bare


class Trainer:
    """A user's own, which publishes for what it holds."""

    def __init__(self, *held: Any) -> None:
        self.held = [{"inner": each} for each in held]

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each["inner"].state_dict() for number, each in enumerate(self.held)}


def scheduled(*models: nn.Module) -> Any:
    optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def counting(model: nn.Module, *others: Any) -> Unregistered:
    gc.collect()  # other tests' schedulers are of other parameters, but averagers are of none
    found = Unregistered((model,), others)
    found.begin(frozenset)
    return found


def stepped(optimizer: Any, scheduler: Any) -> None:
    optimizer.step()
    scheduler.step()


def test_a_scheduler_that_goes_on_is_told() -> None:
    model = nn.Linear(2, 2)
    optimizer, scheduler = scheduled(model)
    found = counting(model)
    assert found.changed() == ()
    stepped(optimizer, scheduler)
    assert found.changed(sometimes=True) == ("scheduler StepLR",)
    assert found.stands_here("scheduler StepLR")
    assert not counting(nn.Linear(2, 2)).stands_here("scheduler StepLR"), "of an optimizer that nobody registered"
    del scheduler
    gc.collect()
    assert found.changed() == ("scheduler StepLR",), "it had gone on"


@pytest.mark.parametrize("how", ["itself", "held", "of schedulers", "global"])
def test_a_scheduler_that_something_registered_publishes_is_not_told(how: str) -> None:
    model = nn.Linear(2, 2)
    optimizer, scheduler = scheduled(model)
    registered: Any = scheduler
    if how == "held":
        registered = Trainer(scheduler)
    elif how == "of schedulers":
        registered = torch.optim.lr_scheduler.SequentialLR(optimizer, [scheduler, scheduler], [5])
    elif how == "global":

        class Local:
            def state_dict(self) -> Any:
                return scheduler.state_dict()

        registered = Local()
    found = counting(model, registered)
    stepped(optimizer, scheduler)
    assert found.changed() == ()
    beside = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    found = counting(model, registered)
    stepped(optimizer, beside)
    assert found.changed() == ("scheduler LambdaLR",), "another one is"


def test_a_data_set_is_not_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands near is found all the same."""
    monkeypatch.setattr("resilient_train.frameworks.torch.checks.unregistered._REACHED_MAX", 50)
    model = nn.Linear(2, 2)
    optimizer, scheduler = scheduled(model)
    found = counting(model, Trainer([[[number]] for number in range(1000)], scheduler))
    stepped(optimizer, scheduler)
    assert found.changed() == ()


def test_what_averages_models_now_and_then_is_told() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

    class Averager(ModelAverager):
        def __init__(self) -> None:  # torch's asks for groups
            self.step = 0

        def average_parameters(self, params: Any) -> None:
            self.step += 1

    averager = Averager()
    found = counting(nn.Linear(2, 2))
    averager.average_parameters(())
    assert found.changed() == (f"averager {Averager.__qualname__}",)
