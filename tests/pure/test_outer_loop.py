"""A loop around ``session.steps()``: which one is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import resilient_train as rt
from resilient_train.errors import ConfigError, UsageError
from resilient_train.session.reading.outer_loop import Made, loop_of_sessions, made_here, outer_loop
from resilient_train.session.reading.static_lookup import Texts

found: list[str] = []
folds: list[str] = []
made: Made = {}


def steps(total: int) -> Iterator[int]:
    found.append(outer_loop(made, Texts()))
    folds.append(loop_of_sessions(made, Texts()))
    return iter(range(total))


def one_loop() -> None:
    for _ in steps(2):
        pass


def epochs() -> None:
    for _ in range(2):  # refused
        for _ in steps(2):
            pass


def a_function_for_each_epoch() -> None:
    for _ in range(2):  # refused
        one_loop()


def until() -> None:
    done = 0
    while done < 2:
        for _ in steps(2):
            done += 1


def sessions() -> None:
    for _ in range(2):  # a fold
        made.update(made_here())
        for _ in steps(2):
            pass


def sessions_with_epochs() -> None:
    for _ in range(2):  # a fold
        made.update(made_here())
        for _ in range(2):  # refused
            for _ in steps(2):
                pass


def sessions_until_one_is_good() -> None:
    for _ in range(2):
        made.update(made_here())
        for _ in steps(2):
            pass
        if found:
            break


def a_function_of_its_own_in_the_loop() -> None:
    def left() -> None:
        return

    for _ in range(2):  # refused
        for _ in steps(2):
            left()


def made_before_and_gone_through_in_parts() -> None:
    every = steps(4)
    for _ in range(2):
        for _ in range(2):
            next(every)


def left_by_the_inner_one() -> None:
    for _ in range(2):
        for each in steps(4):
            if each % 2:
                break


def tried_again() -> None:
    for _ in range(3):
        try:
            one_loop()
        except OSError:
            continue
        break


def what_comes_before() -> None:
    for _ in range(2):
        pass
    for _ in steps(2):
        for _ in range(2):
            pass


@pytest.mark.parametrize(
    "loop", [epochs, a_function_for_each_epoch, a_function_of_its_own_in_the_loop, sessions_with_epochs]
)
def test_epochs_around_the_steps(loop: Callable[[], None]) -> None:
    found.clear()
    made.clear()
    loop()
    text = Path(__file__).read_text().splitlines()
    (place,) = set(found)
    name, line = place.rsplit(":", 1)
    assert name == __file__
    assert text[int(line) - 1].endswith("# refused")
    assert loop.__code__.co_firstlineno < int(line) < loop.__code__.co_firstlineno + 6


@pytest.mark.parametrize(
    "loop",
    [
        one_loop,
        made_before_and_gone_through_in_parts,
        left_by_the_inner_one,
        tried_again,
        what_comes_before,
        until,
        sessions,
    ],
)
def test_loops_that_are_right_are_not(loop: Callable[[], None]) -> None:
    found.clear()
    made.clear()
    loop()
    assert set(found) == {""}


@pytest.mark.parametrize("loop", [sessions, sessions_with_epochs, sessions_until_one_is_good, epochs, one_loop])
def test_a_loop_around_the_session_is_told(loop: Callable[[], None]) -> None:
    for each in (folds, made):
        each.clear()
    loop()
    places = [index for index, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# a fold" in line]
    first = loop.__code__.co_firstlineno
    assert set(folds) == {f"{__file__}:{first + 1}" if first + 1 in places else ""}


def test_epochs_are_refused() -> None:
    model = torch.nn.Linear(1, 1)
    with rt.Session(model=model, optimizer=torch.optim.SGD(model.parameters())) as session:
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"in the loop at {__file__}:.*Epochs"):
                session.steps(3)


def test_a_second_loop_is_refused_without_an_agent_too() -> None:
    """It gave no step, and the script ended well."""
    model = torch.nn.Linear(1, 1)
    with rt.Session(model=model, optimizer=torch.optim.SGD(model.parameters())) as session:
        assert [step.number for step in session.steps(3)] == [0, 1, 2]
        with pytest.raises(UsageError, match="loop is over"):
            next(session.steps(3))


def test_a_loop_that_was_left_goes_on_without_an_agent() -> None:
    model = torch.nn.Linear(1, 1)
    numbers = []
    with rt.Session(model=model, optimizer=torch.optim.SGD(model.parameters())) as session:
        for part in (2, 5):
            for step in session.steps(5):
                numbers.append(step.number)
                if step.number == part:
                    break
    assert numbers == [0, 1, 2, 3, 4]
