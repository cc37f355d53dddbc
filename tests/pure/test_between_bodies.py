"""What a loop changes between two bodies of a window is set again before the second one, behind a redo."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.between_bodies import BetweenBodies
from resilient_train.frameworks.torch.engine import engine_for


class Counts:
    def __init__(self, places: int) -> None:
        self.table = torch.zeros(places)

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table.copy_(state["table"])


class Told(nn.Module):
    """It publishes what it has by itself."""

    value = 1

    def get_extra_state(self) -> int:
        return self.value

    def set_extra_state(self, state: int) -> None:
        self.value = state


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.norm = nn.Linear(3, 2), nn.Dropout(0.1), nn.BatchNorm1d(3)
        self.told = Told()
        self.register_buffer("spare", torch.ones(2))
        self.register_buffer("table", torch.ones(1))
        self.heat = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(self.drop(self.norm(x))) * self.heat
        return out


class Job:
    """A loop of three bodies to an update, and a fault."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Annealed()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.shared, self.large, self.own = Counts(2), Counts(1 << 16), Counts(2)
        self.engine = engine_for(
            Objects(
                models=(self.model,),
                optimizers=(self.optimizer,),
                schedulers=(self.scheduler,),
                scaler=None,
                extra={"shared": self.shared, "large": self.large},
                rank_extra={"own": self.own},
            )
        )

    def body(self) -> None:
        self.model(torch.randn(4, 3)).sum().backward()

    def is_now(self) -> list[Any]:
        model = self.model
        return [
            *(each.clone() for each in (*model.parameters(), *model.buffers())),
            *(None if each.grad is None else each.grad.clone() for each in model.parameters()),
            *(each.requires_grad for each in model.parameters()),
            [
                (each.training, *(getattr(each, name, None) for name in ("heat", "p", "come")))
                for each in model.modules()
            ],
            [dict(group, params=[*map(id, group["params"])]) for group in self.optimizer.param_groups],
            self.scheduler.state_dict(),
            (self.model.told.value, self.model.drop.p),
            [each is None for each in model._buffers.values()],
            [*model._buffers],
            *(each.table.clone() for each in (self.shared, self.large, self.own)),
            torch.is_grad_enabled(),
        ]


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    torch.set_grad_enabled(True)
    made.engine.window.detach()


def freeze(job: Job) -> None:
    job.model.inner.weight.requires_grad_(False)


def evaluate(job: Job) -> None:
    job.model.norm.eval()


def drop_more(job: Job) -> None:
    job.model.drop.p += 0.2


def cool(job: Job) -> None:
    job.model.heat *= 0.5


def come(job: Job) -> None:
    job.model.come = 4  # type: ignore[assignment]


def lower(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] *= 0.9


def schedule(job: Job) -> None:
    job.scheduler.step()


def count(job: Job) -> None:
    job.shared.table += 1


def count_many(job: Job) -> None:
    job.large.table += 1


def count_own(job: Job) -> None:
    job.own.table += 1


def scale_gradients(job: Job) -> None:
    for parameter in job.model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 1.5


def drop_a_gradient(job: Job) -> None:
    job.model.inner.bias.grad = None


def bring_a_gradient(job: Job) -> None:
    job.model.inner.bias.grad = torch.ones(2)


def write_a_buffer(job: Job) -> None:
    assert job.model.norm.running_mean is not None
    job.model.norm.running_mean += 0.5


def put_another_buffer(job: Job) -> None:
    job.model.norm.running_var = torch.full((3,), 2.0)


def write_a_weight(job: Job) -> None:
    with torch.no_grad():
        job.model.inner.weight *= 1.1


def write_weights_and_gradients(job: Job) -> None:
    scale_gradients(job)
    write_a_weight(job)


def past_the_counters(job: Job) -> None:
    for parameter in job.model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(2)
    job.large.table.data.add_(1)
    assert job.model.norm.running_mean is not None
    job.model.norm.running_mean.data.add_(1)


def a_pass(job: Job) -> None:
    """BatchNorm's kernel writes past them."""
    with torch.no_grad():
        job.model.norm(torch.arange(12.0).reshape(4, 3))


def another_module(job: Job) -> None:
    job.model.drop = nn.Dropout(0.3)


def take_out(job: Job) -> None:
    job.model.spare = None


def other_data(job: Job) -> None:
    """Of another shape, to which the old one would fit."""
    job.model.table.data = torch.arange(3.0)


def publish(job: Job) -> None:
    job.model.told.value += 1


def no_gradients(job: Job) -> None:
    torch.set_grad_enabled(False)


CHANGES: tuple[Callable[[Job], None], ...] = (
    *(freeze, evaluate, drop_more, cool, come, lower, schedule, count, count_many, count_own, scale_gradients),
    *(drop_a_gradient, bring_a_gradient, write_a_buffer, put_another_buffer, write_a_weight, no_gradients),
    *(write_weights_and_gradients, past_the_counters, a_pass, another_module, publish),
    *(take_out, other_data),
)


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("looked", [True, False], ids=["in-a-body", "between"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_is_set_again(job: Job, change: Callable[[Job], None], *, looked: bool) -> None:
    """Before the second body and before the third: a fault in the third, or in front of it."""
    between, window = job.engine.between, job.engine.window
    window.begin(whole=True)
    between.begins(0, 0)
    found = []
    for place in range(2):
        if torch.is_grad_enabled():
            job.body()
        between.left(place)
        change(job)
        found.append(job.is_now())
        if place == 0 or looked:
            between.begins(place + 1, 0)
    if looked and torch.is_grad_enabled():
        job.body()
    between.look()
    assert not window.rollback()

    between.begins(0, 0)
    for place in range(2):
        if place == 0 or change is not no_gradients:
            job.body()
        between.left(place)
        between.begins(place + 1, 0)
        assert same(job.is_now(), found[place]), (place, change.__name__)


def test_a_second_fault_in_a_redo(job: Job) -> None:
    """When its first body has run, and what was changed behind it is not set again yet."""
    between, window = job.engine.between, job.engine.window
    window.begin(whole=True)
    between.begins(0, 0)
    job.body()
    between.left(0)
    lower(job)
    scale_gradients(job)
    between.begins(1, 0)
    found = job.is_now()
    for _ in range(2):
        between.look()
        window.rollback()
        between.begins(0, 0)
        job.body()
        between.left(0)
    between.begins(1, 0)
    assert same(job.is_now(), found)


def test_what_is_written_past_the_counters_is_seen_in_first_windows_and_copied_from_then_on(job: Job) -> None:
    between, window = job.engine.between, job.engine.window
    for base in range(5):
        window.begin(whole=True)
        between.begins(0, base)
        job.body()
        between.left(0)
        past_the_counters(job)
        assert between.begins(1, base)
        found = job.is_now()
        window.rollback()
        between.begins(0, base)
        job.body()
        between.left(0)
        between.begins(1, base)
        assert same(job.is_now(), found), base
        window.forget()


def test_whether_tensors_were_written_behind_a_body(job: Job) -> None:
    """Those that were written in front of the first one no body has had a part in."""
    between, window = job.engine.between, job.engine.window
    window.begin()
    assert not between.begins(0, 0)
    between.left(-1)
    write_a_buffer(job)
    between.look()
    job.body()
    between.left(0)
    lower(job)
    assert not between.begins(1, 0)
    job.body()
    between.left(1)
    scale_gradients(job)
    assert between.begins(2, 0)


def test_optimizer_state_that_the_head_writes_is_told(job: Job) -> None:
    job.body()
    job.optimizer.step()
    between = job.engine.between
    between.head_is_repeated()
    assert not between.written_in_head()
    for entry in job.optimizer.state.values():
        entry["exp_avg"].zero_()
    assert between.written_in_head() == "optimizer.0"


def test_a_window_begins_with_nothing_of_the_one_before(job: Job) -> None:
    between = job.engine.between
    job.engine.window.begin()
    between.begins(0, 0)
    job.body()
    between.left(0)
    lower(job)
    between.begins(1, 0)
    job.engine.window.forget()
    job.engine.window.begin()
    between.begins(0, 2)
    rate = job.optimizer.param_groups[0]["lr"] = 0.3
    job.body()
    between.left(0)
    between.begins(1, 2)
    assert job.optimizer.param_groups[0]["lr"] == rate


def test_only_what_was_written_is_copied(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Size] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **how: copied.append(self.shape) or clone(self, **how))
    between = job.engine.between
    assert isinstance(between, BetweenBodies)
    job.engine.window.begin()
    between.begins(0, 0)
    job.body()
    between.left(0)
    copied.clear()
    gradient = job.model.inner.bias.grad
    assert gradient is not None
    gradient *= 2
    between.begins(1, 0)
    assert copied == [job.model.inner.bias.shape]
