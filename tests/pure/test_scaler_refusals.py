"""A gradient scaler that refuses an update, as the engine tells of it; whole jobs are in ``tests/process``."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402


class Loop:
    """A model with two optimizers, and what is told of their updates."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        self.optimizers = tuple(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
        self.told: list[tuple[str, int]] = []
        self.step = engine_for(Objects((self.model,), self.optimizers, (), self.scaler, {}, {})).window
        self.step.attach(self)
        self.step.begin()

    def before_update(self, optimizer: Any) -> None:
        self.told.append(("before", self.optimizers.index(optimizer)))

    def after_update(self, optimizer: Any) -> None:
        self.told.append(("after", self.optimizers.index(optimizer)))

    def given(self) -> None:
        """Nothing is looked for of what flows."""

    def backward(self, *, overflows: tuple[int, ...]) -> None:
        self.scaler.scale(self.model(torch.ones(1, 2)).sum()).backward()
        for index in overflows:
            self.model[index].weight.grad[0, 0] = float("inf")


TURN = [[("before", index), ("after", index)] for index in (0, 1)]


@pytest.mark.parametrize("overflows", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("unscales", [False, True])
def test_each_optimizer_has_a_turn(overflows: tuple[int, ...], unscales: bool) -> None:
    loop = Loop()
    loop.backward(overflows=overflows)
    before = [layer.weight.detach().clone() for layer in loop.model]
    for index, optimizer in enumerate(loop.optimizers):
        if unscales:
            loop.scaler.unscale_(optimizer)
        loop.scaler.step(optimizer)
        told = [each for turn in TURN[: index + 1] for each in turn]
        assert loop.told == told, "where it is refused, and not later"
    loop.scaler.update()
    assert loop.told == TURN[0] + TURN[1]
    changed = [not torch.equal(old, layer.weight) for old, layer in zip(before, loop.model, strict=True)]
    assert changed == [index not in overflows for index in (0, 1)]
    assert loop.scaler.get_scale() == (2.0 if overflows else 4.0)


def test_a_scaler_that_is_switched_off() -> None:
    loop = Loop(enabled=False)
    loop.backward(overflows=())
    loop.scaler.step(loop.optimizers[1])
    loop.optimizers[0].step()
    assert loop.told == TURN[1] + TURN[0]


def test_a_scaler_that_is_switched_off_takes_anything_with_a_step() -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.step = inner.step

    loop = Loop(enabled=False)
    loop.backward(overflows=())
    loop.scaler.step(Wrapper(loop.optimizers[1]))
    assert loop.told == TURN[1]


def test_an_optimizer_of_somebody_else() -> None:
    loop, other = Loop(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loop.scaler.scale(other(torch.ones(1, 2)).sum()).backward()
    other.weight.grad[0, 0] = float("inf")
    loop.scaler.step(optimizer)
    assert loop.told == []


def test_an_optimizer_in_a_wrapper() -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self) -> None:
            self.inner.step()

    for overflows in ((), (1,)):
        loop = Loop()
        loop.backward(overflows=overflows)
        loop.scaler.step(Wrapper(loop.optimizers[1]))
        assert loop.told == TURN[1]


def test_what_is_cut_in_a_refusal_is_taken_back() -> None:
    class CutError(Exception):
        pass

    class Stopped(Loop):
        def before_update(self, optimizer: Any) -> None:
            super().before_update(optimizer)
            if len(self.told) == 1:
                raise CutError

    loop = Stopped()
    for attempt in range(2):
        loop.backward(overflows=(0,))
        loop.scaler.unscale_(loop.optimizers[0])
        if not attempt:
            with pytest.raises(CutError):
                loop.scaler.step(loop.optimizers[0])
            loop.step.rollback()
            loop.step.begin()
            continue
        loop.scaler.step(loop.optimizers[0])
        assert loop.told == [("before", 0), *TURN[0]]


def test_it_goes_with_its_session() -> None:
    loop = Loop()
    loop.step.detach()
    assert "step" not in vars(loop.scaler)
    loop.backward(overflows=(0,))
    loop.scaler.step(loop.optimizers[0])
    assert loop.told == []
