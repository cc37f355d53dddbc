"""Plain values in the attributes of modules: what a redo puts back, and what a new process takes over."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import msgpack
from torch import nn

from resilient_train.frameworks.torch.kept.module_values import ModuleValues, ValuesOf


class Annealed(nn.Module):
    heat = 1.0
    """Of the class, until a forward pass has changed it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.name, self.limit, self.shape = "anneals", math.nan, (2, 3)
        self._passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.heat *= 0.5
        self._passes += 1
        return x


class Publishing(Annealed):
    def get_extra_state(self) -> int:
        return self._passes


def listed(*models: nn.Module) -> list[tuple[tuple[int, str], nn.Module]]:
    return [((index, name), each) for index, model in enumerate(models) for name, each in model.named_modules()]


def values(*models: nn.Module) -> ModuleValues:
    return ModuleValues(listed(*models))


def taken(of: ModuleValues, held: Any = None) -> dict[tuple[int, str], dict[str, Any]]:
    told = of.told(of.held() if held is None else held)
    assert msgpack.decode(msgpack.encode(told), type=tuple[ValuesOf, ...]) == told
    return {each.module: each.values for each in told}


def test_a_redo_finds_what_the_window_did() -> None:
    model = Annealed()
    of = values(model)
    for expected in ({"_passes": 0}, {"_passes": 1, "heat": 0.5}):
        held, before = of.held(), dict(vars(model))
        assert expected.items() <= before.items()
        model(torch.ones(1))
        model.made, model.name = 7, "another"
        of.put_back(held)
        assert vars(model).keys() == before.keys()
        assert all(vars(model)[name] is value for name, value in before.items())
        model(torch.ones(1))


def test_what_becomes_a_tensor_or_goes_is_put_back() -> None:
    model = Annealed()
    model.cache, model.gone = None, 3
    of = values(model)
    held = of.held()
    model.cache = torch.ones(2)
    del model.gone
    of.put_back(held)
    assert model.cache is None
    assert model.gone == 3
    del model.gone
    model.come = 4
    assert of.held().values == values(model).held().values, "as many as before, and not the same"


@pytest.mark.parametrize(
    "other", [torch.tensor(2.0), [2.0], np.float64(2.0), None], ids=["tensor", "list", "NumPy's", "missing"]
)
def test_what_was_no_plain_value_when_somebody_looked_is_put_back(other: Any) -> None:
    """Another attribute has come or gone in that window, in whatever module; this one is plain again behind it."""
    model, neighbour = Annealed(), Annealed()
    model.scale = 1.0
    of = values(nn.Sequential(model, neighbour))
    of.held()
    model.scale = other
    if other is None:
        del model.scale
        model.swapped = [1]
    neighbour.calibrated = True
    of.held()
    if other is None:
        del model.swapped
    model.scale = 2.0
    held = of.held()
    model.scale *= 0.9
    of.put_back(held)
    assert model.scale == 2.0


def test_a_new_process_takes_over_what_is_otherwise_than_as_built() -> None:
    old, new = nn.Sequential(Annealed(), Annealed()), nn.Sequential(Annealed(), Annealed())
    of, to = values(old), values(new)
    assert taken(of) == {}, "a NaN is as it was"
    old[0](torch.ones(1))
    old[1].drop.p = 0.1
    assert taken(of) == {(0, "0"): {"heat": 0.5, "_passes": 1}, (0, "1.drop"): {"p": 0.1}}
    to.take(of.told(of.held()))
    assert (new[0].heat, new[0]._passes, new[1].drop.p, new[1].heat) == (0.5, 1, 0.1, 1.0)
    to.put_back(to.held())
    assert taken(to) == taken(of), "and gives it on"


def test_a_new_process_takes_over_that_something_has_gone() -> None:
    """``getattr(self, "warm_up", 1.0)`` behind ``del self.warm_up``."""
    old, new = Annealed(), Annealed()
    old.warm_up = new.warm_up = 0.5
    of, to = values(old), values(new)
    assert of.told(of.held()) == ()
    del old.warm_up
    told = of.told(of.held())
    to.take(told)
    assert not hasattr(new, "warm_up")
    assert to.told(to.held()) == told, "and tells it to the next one"
    old._passes = [1]
    assert of.told(of.held()) == (), "a list is nothing that it could take over"


def test_the_window_counts() -> None:
    model = Annealed()
    of = values(model)
    model.drop.p = 0.1
    held = of.held()
    model(torch.ones(1))
    model.drop.p = 0.2
    assert taken(of, held) == {(0, "drop"): {"p": 0.1}}
    of.put_back(held)
    assert model.drop.p == 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"cache": torch.ones(1)},
        {"shape": (3, 2)},
        {"name": ["another"]},
        {"number": 1 << 64},
        {"number": 1j},
    ],
)
def test_of_a_module_that_has_changed_anything_else_nothing_is_taken_over(change: dict[str, Any]) -> None:
    model = Annealed()
    of = values(model)
    model(torch.ones(1))
    vars(model).update(change)
    model.drop.p = 0.1
    assert taken(of) == {(0, "drop"): {"p": 0.1}}
    assert not [each for each in of.settled() if each[0] is model]


def test_another_module_in_its_place_was_not_built() -> None:
    model = nn.Sequential(Annealed(), nn.Dropout(0.5))
    of = values(model)
    model[0], model[1].p = Annealed(), 0.1
    model[0](torch.ones(1))
    assert taken(ModuleValues(listed(model), of)) == {(0, "1"): {"p": 0.1}}


class Scaled(Annealed):
    """Publishes one thing, and changes another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = torch.ones(3), 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale, "seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale, self.seen = state["scale"].clone(), state["seen"]


def test_what_a_module_publishes_stays_its_ranks_own() -> None:
    """The rest of its attributes is as any module's."""
    model, new = Scaled(), Scaled()
    of, theirs = values(model), values(new)
    held = of.held()
    model(torch.ones(1))
    model.seen = 5
    of.put_back(held)
    model.set_extra_state({"scale": model.scale, "seen": 3})
    model(torch.ones(1))
    new.set_extra_state({"scale": torch.zeros(3), "seen": 7})
    theirs.take(of.told(of.held()))
    assert (new.heat, new._passes, new.seen, new.scale.tolist()) == (0.5, 1, 7, [0, 0, 0])


class Alone(Annealed):
    """It gives a copy of a tensor that each pass makes anew, and counts besides."""

    def __init__(self, *, among_others: bool) -> None:
        super().__init__()
        self.among_others, self.scale, self.others = among_others, torch.ones(2), torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale * 0.5
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return (3, self.scale.clone()) if self.among_others else self.scale.clone()

    def set_extra_state(self, state: Any) -> None:
        self.scale = state[1] if self.among_others else state


@pytest.mark.parametrize("among_others", [False, True])
def test_a_module_may_publish_without_names(among_others: bool) -> None:
    """Whatever it gave but a dictionary, its other attributes were not taken over, and nobody was told."""
    model, new = Alone(among_others=among_others), Alone(among_others=among_others)
    of, theirs = values(model), values(new)
    of.held()
    model(torch.ones(1))
    theirs.take(of.told(of.held()))
    assert (new.heat, new._passes, new.scale.tolist()) == (0.5, 1, [1, 1])
    ((_, names),) = [each for each in of.settled() if each[0] is model]
    assert {"_passes", "scale"} <= names
    model.others = model.others + 1
    assert not [each for each in of.settled() if each[0] is model]


def test_names_that_are_no_text_are_not_sent() -> None:
    """They ended the first save of a job."""
    model = Annealed()
    of = values(model)
    model.name = "caf\udce9"
    assert taken(of) == {}
    assert not [each for each in of.settled() if each[0] is model]
    model.name = "café"
    assert taken(of) == {(0, ""): {"name": "café"}}
    assert of.changed() == [((0, ""), "name", "café")]


def test_what_wraps_is_left_out() -> None:
    wrapper = nn.DataParallel(Annealed())
    model = nn.ModuleList([Publishing(), wrapper, nn.MultiheadAttention(2, 1)])
    of = values(model)
    held = of.held()
    model[0](torch.ones(1))
    wrapper.dim, model[2]._qkv_same_embed_dim = 1, False
    of.put_back(held)
    assert model[0]._passes == 0
    assert taken(of) == {}
    settled = [part for part, _ in of.settled()]
    assert any(part is wrapper.module for part in settled)
    assert not any(part is wrapper for part in settled)


def test_private_attributes_of_a_librarys_class_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("library")
    library.__file__ = "/somewhere/site-packages/library.py"
    monkeypatch.setitem(sys.modules, "library", library)
    base = type("Base", (nn.Module,), {"__module__": "library"})
    model = type("Model", (base,), {"count": 0, "_hook": ""})()
    of = values(model)
    held = of.held()
    model.count, model._hook = 1, "in a step"
    of.put_back(held)
    assert (model.count, model._hook) == (0, "in a step")
    model.count = 1
    assert taken(of) == {(0, ""): {"count": 1}}


def test_a_module_in_anothers_place() -> None:
    """A process that takes a rank's place builds the first one."""
    model = nn.Sequential(nn.ReLU(), nn.Dropout(0.5), Annealed())
    first = values(model)
    for number, other in enumerate((nn.ReLU(), nn.Dropout(0.5), Annealed())):
        model[number] = other  # like the first
    assert ModuleValues(listed(model), first).exchanged() == []
    model[0], model[1], model[2].drop = nn.Tanh(), nn.Dropout(0.25), nn.Identity()
    found = dict(ModuleValues(listed(model), first).exchanged())
    assert [*found] == [(0, "0"), (0, "1"), (0, "2.drop")]
    assert "activation.Tanh " in found[0, "0"]
    assert "('p', 0.25)" in found[0, "1"]
    del model[2].drop
    model[2].more = nn.Identity()
    found = dict(ModuleValues(listed(model), first).exchanged())
    assert found[0, "2.drop"] == "none"
    assert found[0, "2.more"].startswith("torch.nn.modules.linear.Identity ")


def test_a_value_that_a_new_process_does_not_get() -> None:
    """Something else in its module has changed too: decision 60."""
    model, of = (built := Annealed()), values(built)
    model.drop.p = 0.25
    assert (of.kept_back(), taken(of)) == ([], {(0, "drop"): {"p": 0.25}})
    model.drop.mask = torch.ones(2)
    model.heat = 0.5
    model.maps = [1]
    assert of.kept_back() == [((0, ""), "heat", 0.5), ((0, "drop"), "p", 0.25)]
    assert taken(of) == {}
