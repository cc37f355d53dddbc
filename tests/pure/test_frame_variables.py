"""A function's variables are read so that it does not notice."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from resilient_train.session.reading.frame_variables import may_keep_locals, variables


def stored() -> Any:
    kept = locals()
    return kept, 1


def in_an_attribute(self: Any) -> None:
    self.kept = locals()


def handed_on() -> Any:
    return print(vars())


def given_back() -> Any:
    return locals()


def copied() -> Any:
    for each in locals():
        print(each)
    return {**locals()}, locals().copy(), dict(locals())


def unpacked() -> None:
    print(**locals())


def of_an_object(args: Any) -> Any:
    return vars(args)


def nothing() -> None:
    """Says nothing."""


@pytest.mark.parametrize("function", [stored, in_an_attribute, handed_on, given_back])
def test_who_may_keep_its_variables(function: Callable[..., Any]) -> None:
    assert may_keep_locals(function.__code__)


@pytest.mark.parametrize("function", [copied, unpacked, of_an_object, nothing])
def test_who_does_not(function: Callable[..., Any]) -> None:
    assert not may_keep_locals(function.__code__)


def test_a_configuration_stays_what_it_was() -> None:
    """``config = locals()`` in the first line of a training."""

    def train(lr: float, width: int) -> tuple[dict[str, Any], dict[str, Any]]:
        config = locals()
        model = [lr] * width
        found = variables(sys._getframe())
        assert len(model) == width
        return config, found

    config, found = train(0.1, 2)
    assert config == {"lr": 0.1, "width": 2}
    assert "model" not in found
    assert found["pytest"] is pytest


def test_nothing_is_held() -> None:
    value: Any = object()
    before = sys.getrefcount(value)
    found = variables(sys._getframe())
    assert found["value"] is value
    del found
    assert sys.getrefcount(value) == before
