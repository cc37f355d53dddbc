"""A gradient of before that reaches an update is refused; one that is dropped before that is nobody's business."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is
from torch.nn.utils import clip_grad  # noqa: E402

from resilient_train.errors import UsageError  # noqa: E402
from resilient_train.frameworks.torch.checks.carried_gradients import CarriedGradients  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def clipped_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a test that was refused, or never took its hooks away."""
    monkeypatch.setattr(clip_grad, "_clip_grads_with_norm_", clip_grad._clip_grads_with_norm_)


class Loop:
    """One body a window, with two parameters and an optimizer for each."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 1)
        self.carried = CarriedGradients([self.first, self.second])
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.first, self.second)]
        self.window = -1

    def begin(self) -> None:
        self.carried.begin()
        self.window += 1

    def backward(self) -> None:
        self.second(self.first(torch.ones(4, 3))).sum().backward()

    def zero(self, *, to_none: bool = True, which: tuple[int, ...] = (0, 1)) -> None:
        for each in which:
            self.optimizers[each].zero_grad(set_to_none=to_none)

    def step(self, *which: int) -> None:
        for each in which:
            self.carried.check(self.optimizers[each])
            self.optimizers[each].step()


def clips(loop: Loop) -> None:
    loop.zero(to_none=False)
    loop.backward()
    nn.utils.clip_grad_norm_(loop.first.parameters(), 0.1)
    loop.step(0, 1)


def zeroes_last(loop: Loop) -> None:
    loop.backward()
    loop.step(0, 1)
    loop.zero()


def zeroes_first(loop: Loop) -> None:
    loop.zero()
    loop.backward()
    loop.step(0, 1)


def writes_zeros_last(loop: Loop) -> None:
    loop.backward()
    loop.step(0, 1)
    loop.zero(to_none=False)


def writes_zeros_first(loop: Loop) -> None:
    loop.zero(to_none=False)
    loop.backward()
    loop.backward()
    loop.step(0, 1)


def by_turns(loop: Loop) -> None:
    """A GAN's: a pass of the one leaves gradients of the other, which drops them before its own."""
    me = loop.window % 2
    loop.zero(which=(me,))
    loop.backward()
    loop.step(me)


def by_turns_in_place(loop: Loop) -> None:
    me = loop.window % 2
    loop.zero(to_none=False, which=(me,))
    loop.backward()
    loop.step(me)


def puts_them_there(loop: Loop) -> None:
    """By hand, over those that are there."""
    parameters = [*loop.first.parameters(), *loop.second.parameters()]
    made = torch.autograd.grad(loop.second(loop.first(torch.ones(4, 3))).sum(), parameters)
    for parameter, gradient in zip(parameters, made, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)
    loop.step(0, 1)


def rarely(loop: Loop) -> None:
    """One does not use what it has each fourth time, and drops it."""
    loop.zero()
    loop.backward()
    loop.step(0) if loop.window % 4 else loop.step(0, 1)


@pytest.mark.parametrize(
    "body",
    [
        *(zeroes_last, zeroes_first, writes_zeros_last, writes_zeros_first, by_turns, by_turns_in_place),
        *(puts_them_there, rarely, clips),
    ],
)
def test_loops_that_drop_them(body: Callable[[Loop], None]) -> None:
    loop = Loop()
    for _ in range(40):
        loop.begin()
        body(loop)
    loop.carried.close()


def never_zeroes(loop: Loop) -> None:
    loop.backward()
    loop.step(0, 1)


def zeroes_one_of_them(loop: Loop) -> None:
    loop.zero(which=(0,))
    loop.backward()
    loop.step(0, 1)


def accumulates_in_one(loop: Loop) -> None:
    """The second steps each eighth time, with all that has come together by then."""
    loop.backward()
    if loop.window % 8 == 7:
        loop.step(0, 1)
        loop.zero()
    else:
        loop.step(0)
        loop.zero(which=(0,))


def steps_later(loop: Loop) -> None:
    """By what the window before has computed."""
    loop.step(0, 1)
    loop.zero()
    loop.backward()


def replaces_them(loop: Loop) -> None:
    """By tensors that are made of them: clipped by hand, say."""
    loop.backward()
    for parameter in loop.first.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-1, 1)
    loop.step(0)
    loop.zero(which=(1,))


def with_a_graph(loop: Loop) -> None:
    """Autograd puts the sum in another tensor then."""
    loop.second(loop.first(torch.ones(4, 3))).square().sum().backward(create_graph=True)
    loop.step(0, 1)
    for each in (*loop.first.parameters(), *loop.second.parameters()):
        assert each.grad is not None
        each.grad = each.grad.detach()


def clips_all_of_them(loop: Loop) -> None:
    """The norm has the gradients of the one that is not zeroed until its own turn."""
    me = loop.window % 2
    loop.zero(which=(me,))
    loop.backward()
    nn.utils.clip_grad_norm_([*loop.first.parameters(), *loop.second.parameters()], 0.1)
    loop.step(me)


def trains_by_turns(loop: Loop) -> None:
    """The second is frozen in each other window, with its gradient left there."""
    loop.second.requires_grad_(bool(loop.window % 2))
    loop.backward()
    loop.step(*((0, 1) if loop.window % 2 else (0,)))
    loop.zero(which=(0,))
    loop.second.requires_grad_(False)


@pytest.mark.parametrize(
    ("body", "window"),
    [
        *((never_zeroes, 1), (zeroes_one_of_them, 1), (accumulates_in_one, 7), (steps_later, 1), (replaces_them, 1)),
        *((with_a_graph, 1), (trains_by_turns, 3), (clips_all_of_them, 1)),
    ],
)
def test_loops_that_carry_them_on(body: Callable[[Loop], None], window: int) -> None:
    loop = Loop()
    with pytest.raises(
        UsageError, match=r"(SGD is about to update|norm_ takes the norm of) '\w+', .* from an update before"
    ):
        for _ in range(40):
            loop.begin()
            body(loop)
    assert loop.window == window


def test_from_before_the_loop() -> None:
    loop = Loop()
    loop.backward()
    loop.begin()
    loop.backward()
    with pytest.raises(UsageError, match="from before the loop"):
        loop.step(0)
    laid_out_anew = Loop()
    laid_out_anew.backward()
    laid_out_anew.begin()
    for each in laid_out_anew.first.parameters():
        assert each.grad is not None
        each.grad = each.grad.clone()
    laid_out_anew.backward()
    with pytest.raises(UsageError, match="from before the loop"):
        laid_out_anew.step(0)
    dropped = Loop()
    dropped.backward()
    dropped.begin()
    zeroes_first(dropped)


def test_a_window_that_is_taken_back() -> None:
    """It begins with zeros, so there is nothing of before in it."""
    loop = Loop()
    loop.backward()
    loop.begin()
    loop.backward()
    loop.carried.forget()
    loop.zero(to_none=False)
    loop.backward()
    loop.step(0, 1)


def test_hooks_are_there_in_few_windows_and_only_where_there_are_gradients() -> None:
    def hooked(body: Callable[[Loop], None]) -> list[int]:
        loop, found = Loop(), list[int]()
        for _ in range(40):
            loop.begin()
            if loop.carried._hooks:
                found.append(loop.window)
            body(loop)
        return found

    assert hooked(zeroes_last) == []
    assert hooked(zeroes_first) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33]
    assert clip_grad._clip_grads_with_norm_.__module__ == clip_grad.__name__, "put back, each time"
    seen = hooked(by_turns)
    assert all(later == window + 1 or later in (2, 4, 8, 16, 32, 33) for window, later in pairwise(seen)), seen
    assert len(seen) <= 16, "until what was added to is dropped"
