"""The variables of a function are read so that it does not notice."""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resilient_train.frame_variables import is_function, variables


def kept_in_the_first_line(look: Callable[[], Any]) -> Any:
    config = locals()
    model = [1]
    look()
    return {**config}, len(model)


def kept_by_the_dictionary(look: Callable[[], Any]) -> Any:
    seen = []
    for _ in range(3):
        seen = locals().setdefault("_seen", [])
        seen.append(1)
        look()
    return seen


def made_by_a_text(look: Callable[[], Any]) -> Any:
    exec("scale = 2.0")
    look()
    return eval("scale")


def kept_by_another(look: Callable[[], Any]) -> Any:
    def mine() -> Any:
        return inspect.stack()[1].frame.f_locals

    lr = 0.1
    given = mine()
    look()
    return given["lr"], lr


_HAS_ONE_DICTIONARY = pytest.mark.skipif(sys.version_info >= (3, 13), reason="each locals() is another one there")


@pytest.mark.parametrize(
    "way",
    [
        kept_in_the_first_line,
        kept_by_the_dictionary,
        pytest.param(made_by_a_text, marks=_HAS_ONE_DICTIONARY),
        kept_by_another,
    ],
)
def test_what_it_has_of_them_stays_what_it_was(way: Callable[..., Any]) -> None:
    looks = []

    def look() -> None:
        looks.append(variables(sys._getframe(1)))

    def alone() -> None:
        """Looks at nothing."""

    without, found = way(alone), way(look)
    without, found = (
        ({**each[0], "look": None}, each[1]) if isinstance(each, tuple) and isinstance(each[0], dict) else each
        for each in (without, found)
    )
    assert found == without
    assert looks[-1]["look"] is look


def test_of_each_kind() -> None:
    around = 1
    unset: Any

    def function(argument: int, in_inner: list[int], *rest: int, **more: int) -> tuple[dict[str, Any], Any]:
        after = around

        def inner() -> list[int]:
            return in_inner

        found = variables(sys._getframe())
        return found, (after, inner, inner())

    found, _ = function(2, [3], 4, five=5)
    assert {name: each for name, each in found.items() if name != "inner"} == {
        "argument": 2, "in_inner": [3], "rest": (4,), "more": {"five": 5}, "after": 1, "around": 1,
    }  # fmt: skip
    own = variables(sys._getframe())
    assert "unset" not in own
    assert own["around"] == 1
    if around > 1:
        unset = function
        print(unset, own)


def test_of_a_generator_and_a_comprehension() -> None:
    def frames() -> Iterator[dict[str, Any]]:
        step = 7
        yield variables(sys._getframe())
        print(step)

    assert next(frames()) == {"step": 7}
    (found,) = [variables(sys._getframe()) for each in (8,)]
    assert found["each"] == 8


def test_of_a_class_and_of_a_text() -> None:
    class Body:
        width = 3
        found = variables(sys._getframe())

    assert Body.found["width"] == 3
    space = {"look": variables, "sys": sys, "is_function": is_function}
    exec("depth = 4; found = look(sys._getframe()); of_function = is_function(sys._getframe())", space)
    assert space["found"]["depth"] == 4  # type: ignore[index]
    assert space["of_function"] is False


def test_of_no_frame() -> None:
    with pytest.raises(TypeError, match="a frame is wanted"):
        variables.__globals__["function_variables"](1)


def test_nothing_is_held() -> None:
    value: Any = object()
    before = sys.getrefcount(value)
    found = variables(sys._getframe())
    assert found["value"] is value
    del found
    assert sys.getrefcount(value) == before
