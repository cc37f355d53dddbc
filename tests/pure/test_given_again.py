"""Whether bodies are given what earlier ones have returned, and which objects go along from call to call."""

import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch

from resilient_train.session.redo.given_again import GivenAgain
from resilient_train.session.redo.kept_calls import BodyCall


class Averages(NamedTuple):
    count: int
    mean: float


class Meter:
    average = 0.5


def body(state: Any, batch: Any = None, *, meter: Any = None) -> Any:
    return state, batch, meter


STATES = [torch.ones(2), 0.25, Averages(3, 0.75), {"mean": 0.1}, Meter()]


@pytest.mark.parametrize("state", STATES, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_returned_and_given_again(state: Any, whole: bool) -> None:
    again = GivenAgain()
    first = BodyCall(body, (state, torch.ones(3)), {})
    again.begin(first)
    assert not again.results
    again.end(first, state if whole else (0.5, state))
    again.begin(BodyCall(body, (state,), {}))
    assert again.results


def test_equal_numbers_are_not_the_same_one() -> None:
    again = GivenAgain()
    for step in range(20):
        call = BodyCall(body, (step, "train"), {"meter": None})
        again.begin(call)
        again.end(call, (step + 1, "train", True, float(step)))
    assert not again.results


def test_an_object_that_goes_along() -> None:
    again, meter, settings, losses = GivenAgain(), Meter(), {"rate": 0.1}, [1.0]
    for step in range(3):
        call = BodyCall(body, ({"x": torch.ones(2), **settings},), {"meter": meter} if step else {})
        again.begin(call)
        again.end(call, None)
        assert again.known == (step > 0)
    assert again.lasting(call) == {"meter": meter}
    for _ in range(2):
        call = BodyCall(body, (settings, losses), {})
        again.end(call, None)
    assert again.lasting(call) == {"state": settings, "batch": losses}
    assert again.lasting(BodyCall(print, (settings,), {})) == {}


class Items(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise TypeError("whole numbers only")


def test_a_list_of_the_users_own() -> None:
    again, state = GivenAgain(), torch.ones(2)
    again.end(BodyCall(body, (Items([state]),), {}), Items([state]))
    again.begin(BodyCall(body, (Items([state]),), {}))
    assert again.results


def test_what_is_large_or_nested_is_not_kept_alive() -> None:
    again, batch = GivenAgain(), torch.ones(3)
    kept = weakref.ref(batch)
    again.end(BodyCall(body, ({"x": [batch], "y": [0.5] * 100}, [0.5] * 100 + [batch]), {}), None)
    del batch
    gc.collect()
    assert kept() is None


def test_nothing_is_kept_alive() -> None:
    again, batch, logits = GivenAgain(), torch.ones(3), torch.ones(4)
    kept = weakref.ref(batch), weakref.ref(logits)
    again.end(BodyCall(body, ({"x": batch}, [batch]), {"meter": batch}), {"logits": [logits], "loss": 0.5})
    del batch, logits
    gc.collect()
    assert [each() for each in kept] == [None, None]
