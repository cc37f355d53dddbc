"""What flows from step to step: given back, handed on, and told where it would flow unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from resilient_train.errors import ConfigError, UsageError  # noqa: E402
from resilient_train.frameworks.torch.rank_state import TorchRankState  # noqa: E402
from resilient_train.session import carried as carried_module  # noqa: E402
from resilient_train.session.carried import Carried, check_places  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def session() -> Iterator[None]:
    carried_module.watch(on=True)
    yield
    carried_module.watch(on=False)


def counting() -> Callable[[], int]:
    numbers = iter(range(100))
    return lambda: next(numbers)


def test_a_value_is_made_when_it_is_needed_or_before() -> None:
    ahead = Carried(make=counting())
    assert [ahead.take(), ahead.take()] == [0, 1]
    ahead.fetch()
    ahead.fetch()
    assert [ahead.take(), ahead.take()] == [2, 3], "a second fetch has nothing to do"


def test_a_value_is_put_once_it_was_taken() -> None:
    hidden = Carried((1, [2.5, None], {"k": "v"}))
    assert hidden.take() == (1, [2.5, None], {"k": "v"})
    with pytest.raises(UsageError, match=r"put\(\) the next value in the same step"):
        hidden.take()
    hidden.put(7)
    assert hidden.take() == 7


@pytest.mark.parametrize("make", [None, counting()])
def test_it_begins_with_a_value_or_with_what_makes_one(make: Callable | None) -> None:
    with pytest.raises(ConfigError, match="a first value, or make="):
        Carried(make=None) if make is None else Carried(3, make=make)


def test_a_step_that_takes_and_puts_nothing_is_told_at_its_first_update() -> None:
    """And not when a fault has made something else of it."""
    hidden, ahead = Carried(torch.zeros(2)), Carried(make=counting())
    hidden.take()
    with pytest.raises(UsageError, match=r"put\(\) the next one before optimizer.step\(\)"):
        hidden.state_dict()
    ahead.take()
    assert ahead.state_dict() == {"full": False}


def test_a_graph_does_not_leave_its_step() -> None:
    hidden = Carried(torch.zeros(2))
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(UsageError, match=r"detach\(\) it"):
        hidden.put({"h": [weight * 2]})
    hidden.put({"h": [weight.detach()]})


def test_what_is_packed_comes_back_in_memory_of_its_own() -> None:
    first = Carried((torch.arange(3), {"x": [torch.ones(2, 2, dtype=torch.bfloat16), 4]}))
    other = Carried(make=counting())
    packed = TorchRankState((), {"it": first}).packed()
    first.take()[0].add_(100)
    first.put(0)
    for each in (first, other):
        TorchRankState((), {"it": each}).restore(packed)
        count, named = each.take()
        assert count.tolist() == [0, 1, 2]
        assert named["x"][0].dtype is torch.bfloat16
        assert named["x"][1] == 4


def test_an_empty_place_comes_back_empty() -> None:
    ahead = Carried(make=counting())
    own = TorchRankState((), {"it": ahead})
    own.keep()
    ahead.fetch()
    own.rollback()
    assert ahead.take() == 1, "what the cut step had made is made again, from the random numbers of its begin"


def test_a_body_is_cut_where_the_place_is_empty() -> None:
    """The place can't tell what it holds there, and is not asked."""
    hidden = Carried((torch.ones(2), [3]))
    own = TorchRankState((), {"it": hidden})
    own.keep()
    hidden.take()[0].add_(1)
    own.rollback()
    value, more = hidden.take()
    assert (value.tolist(), more) == ([1.0, 1.0], [3])


def test_a_value_goes_back_to_the_device_that_it_was_on() -> None:
    there = Carried(torch.zeros(2))
    state = {"full": True, "value": (torch.zeros(2), [torch.zeros(3), 5]), "devices": ["meta", "cpu", ""]}
    there.load_state_dict(state)
    first, (second, third) = there.take()
    assert (first.device.type, second.device.type, third) == ("meta", "cpu", 5)


def test_one_that_the_session_does_not_know_is_told(session: None) -> None:
    known = Carried(make=counting())
    known.registered(lambda: True)
    assert known.take() == 0
    with pytest.raises(UsageError, match="is not registered"):
        Carried(1)
    with pytest.raises(UsageError, match="is not registered"):
        Carried(make=counting()).take()


def test_a_value_is_taken_in_the_step_that_uses_it(session: None) -> None:
    ahead = Carried(make=counting())
    before_update = True
    ahead.registered(lambda: before_update)
    assert ahead.take() == 0
    before_update = False
    ahead.fetch()
    with pytest.raises(UsageError, match="take it in the body that uses it"):
        ahead.take()


def test_it_is_each_ranks_own() -> None:
    check_places({"ema": object()})
    with pytest.raises(ConfigError, match=r"state\['batch'\] is a Carried"):
        check_places({"batch": Carried(1)})
