"""``session.call`` without an agent, and the order of calls and random numbers with one that is played."""

import io
import random
from collections.abc import Collection, Iterator, Sequence
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import resilient_train as rt
from resilient_train.errors import UsageError
from resilient_train.frameworks.torch.checks.arguments import look
from resilient_train.protocol.rank_effects import Mode
from resilient_train.session.calls import Calls, PlainCalls
from resilient_train.session.redo.body_variables import BodyVariables
from resilient_train.session.redo.kept_calls import BodyCall, KeptCall
from resilient_train.session.redo.randomness import BodiesRandom
from resilient_train.session.step import Step


class Numbers:
    """An engine with random numbers: a state is how many were drawn of which stream."""

    def __init__(self) -> None:
        self.state = b"0"

    def random_state(self) -> bytes:
        return self.state

    def restore_random_state(self, state: bytes) -> None:
        self.state = state

    def draw(self) -> None:
        self.state = str(int(self.state) + 1).encode()


class PlayedDriver:
    """Three steps to an update; ``cuts``: at which of all bodies (by their order) a fault comes; ``behind``: behind
    which of them one is seen, before the next call.
    """

    kept_calls: Sequence[KeptCall] = ()

    def __init__(self, *cuts: int, behind: Collection[int] = (), joined_late: bool = False) -> None:
        self.cuts, self.behind, self.joined_late = cuts, behind, joined_late
        self.begun = self.calling = self.over = False
        self.base = self.place = self.bodies = 0
        self.modes: list[Mode] = []
        self.others: list[int] = []
        self.next = False
        self.cut = False

    @property
    def number(self) -> int:
        return self.base + self.place

    @property
    def window_open(self) -> bool:
        return self.begun and (self.place > 0 or not self.next)

    def look(self, arguments: Any, variables: Any, *, plain: bool) -> bytes:
        return repr(arguments).encode()

    def announces(self, look: bytes) -> None:
        pass

    def gets_other_arguments(self) -> None:
        self.others.append(self.number)

    def head_begins(self) -> None:
        pass

    def head_ends(self) -> None:
        pass

    def step_made(self, call: Any, again: Any) -> None:
        pass

    def set_mode(self, mode: Mode) -> None:
        self.modes.append(mode)

    def next_step(self, total: int) -> Step:
        if self.cut:
            self.place = 0
            for call in self.kept_calls:
                call.cut()
        self.begun, self.cut, self.next = True, False, False
        return Step(self, self.number)

    def enter(self, step: Step) -> None:
        pass

    def leave(self, step: Step, error: BaseException | None) -> bool:
        self.bodies += 1
        if self.bodies in self.cuts:
            self.cut = True
            return True
        self.cut = self.bodies in self.behind
        if error is None:
            self.place += 1
            if self.place == 3:
                self.base, self.place, self.next = self.base + 3, 0, True
        return False


def played(driver: PlayedDriver, numbers: Numbers) -> tuple[Calls, list[str]]:
    seen: list[str] = []
    return Calls(driver, BodiesRandom(numbers)), seen  # type: ignore[arg-type] # what they need of them


def test_a_cut_window_is_called_again_from_its_first_body() -> None:
    numbers = Numbers()
    calls, seen = played(PlayedDriver(5), numbers)

    def body(name: str) -> str:
        seen.append(name)
        return name.upper()

    results = [calls.make(BodyCall(body, (name,), {})) for name in "abcdefg"]
    assert results == list("ABCDEFG")
    assert seen == list("abcde" + "de" + "fg")


def test_a_body_that_writes_into_its_arguments_is_told_when_it_is_called_again() -> None:
    driver = PlayedDriver(5, 6)
    calls, _ = played(driver, Numbers())
    for name in "abcdef":
        calls.make(BodyCall(lambda names, last: names.append(last) if last in "de" else None, ([name], name), {}))
    assert driver.others == [3, 3, 4], "the first of the window is called three times, the second twice"
    assert driver.bodies == 9


COUNT = 0
"""Of the module, as loops that are no function's have theirs."""


@pytest.mark.parametrize("of_module", [False, True])
def test_a_body_that_runs_again_finds_the_variables_around_it_as_they_were(of_module: bool) -> None:
    """Those that the loop moves on; and those that bodies count by."""
    global COUNT
    driver, seen, count, name, there = PlayedDriver(5, 6), list[str](), 0, "", ""
    calls, _ = played(driver, Numbers())

    def body(unused: None) -> str:
        nonlocal count
        count += 1
        seen.append(f"{name}{count}")
        return seen[-1]

    def body_of_module() -> str:
        global COUNT
        COUNT += 1
        seen.append(f"{name}{COUNT}")
        return seen[-1]

    COUNT = 0
    results = []
    for name in "abcdef":
        del there  # a variable that has no value, while it runs
        made = BodyCall(body_of_module, (), {}) if of_module else BodyCall(partial(body), (None,), {})
        results.append(calls.make(made))
        there = name
    assert there == "f"
    assert results == ["a1", "b2", "c3", "d4", "e5", "f6"]
    assert seen == ["a1", "b2", "c3", *("d4", "e5"), *("d4",), *("d4", "e5"), "f6"]
    assert (name, COUNT if of_module else count) == ("f", 6)


K = 0


@pytest.mark.parametrize(
    ("cut", "behind", "expected"),
    [
        ((6,), (), [[0], [1], [2], [3], [4], [5, 3, 4, 5]]),
        ((2,), (4,), [[0], [1, 0, 1], [0, 1, 2], [3], [4], [5]]),
        ((), (1,), [[0], [0, 1], [2], [3], [4], [5]]),
    ],
)
def test_also_where_a_fault_is_seen_between_two_calls_and_where_an_inner_function_names_it(
    cut: tuple[int, ...], behind: tuple[int, ...], expected: list[list[int]]
) -> None:
    """The second fault of a window was taken for one that had found them all as they are."""
    global K
    driver, seen = PlayedDriver(*cut, behind=behind), list[int]()
    calls, _ = played(driver, Numbers())

    def once(call: Any) -> Any:
        @wraps(call)
        def inner(*args: Any) -> Any:
            return call(*args)

        return inner

    results = []
    for K in range(6):
        seen.clear()
        calls.make(BodyCall(once(lambda _: seen.extend(K for _ in range(1))), (K % 3 == 2,), {}))  # noqa: B023
        results.append([*seen])
    assert results == expected


def test_what_a_body_does_not_read_of_another_is_no_variable_of_its() -> None:
    """The name of an attribute, and what it writes before it reads it: a new process has something else there."""

    def body(x: Any) -> Any:
        global COUNT
        nonlocal count
        COUNT = count = 5
        return x.K + COUNT + count

    count = 0
    assert BodyVariables(body).found == []

    cuts = 7

    def reads() -> Any:
        global COUNT
        if seen:
            COUNT = 5
        return COUNT

    seen: list[int] = []
    assert BodyVariables(reads).found == [seen, COUNT]
    assert BodyVariables(lambda: (cuts, K, COUNT, K, cuts)).found == [cuts, COUNT, K], "in all processes alike"


def test_the_body_of_an_installed_package_names_its_variables_as_well() -> None:
    names: dict[str, Any] = {"batch": 7}
    exec(compile("def body():\n    return batch", "/usr/lib/site-packages/trainer.py", "exec"), names)
    assert BodyVariables(names["body"]).found == [7]


def test_what_is_put_back_between_stays_put_back() -> None:
    """An object in ``state`` may load its state by giving the variable another tensor, and the body writes in place."""
    total = [0]

    def body() -> None:
        total[0] += 1

    variables = BodyVariables(body)
    with variables.as_found():
        body()
    variables.cut()
    total = [0]
    with variables.as_found():
        body()
    assert total == [1]


def test_a_body_that_has_none_is_called_all_the_same() -> None:
    def late() -> str:
        return there

    variables = BodyVariables(late)
    there = "by then"
    with variables.as_found(), pytest.raises(NameError):
        late()
    assert late() == "by then"
    with BodyVariables(len).as_found():
        pass


def test_what_a_body_gets_by_partial_is_looked_at() -> None:
    driver = PlayedDriver(5)
    calls, _ = played(driver, Numbers())
    for name in "abcdef":
        calls.make(BodyCall(partial(lambda names: names.append(1), [name]), (), {}))
    assert driver.others == [3, 4]


@pytest.mark.parametrize("given", [iter([1]), [zip([1])], {"x": (each for each in ())}])
def test_what_can_be_used_once_is_refused(given: Any) -> None:
    calls, _ = played(PlayedDriver(), Numbers())
    for made in (
        BodyCall(print, (given,), {}),
        BodyCall(partial(print, given), (), {}),
        BodyCall(print, (), {"x": given}),
    ):
        with pytest.raises(UsageError, match="to its body, which can be gone through once"):
            calls.make(made)


def test_a_log_is_no_data() -> None:
    calls, _ = played(PlayedDriver(), Numbers())
    calls.make(BodyCall(lambda log: log.write("x"), (io.StringIO(),), {}))


def test_an_earlier_body_that_updates_when_it_runs_again_ends_the_loop() -> None:
    """It went on for ever: no call came to its own body any more."""
    driver = PlayedDriver(3)
    calls, _ = played(driver, Numbers())

    def body() -> None:
        if driver.bodies == 3:  # the first one, once more
            driver.place = 2

    for _ in range(2):
        calls.make(BodyCall(body, (), {}))
    with pytest.raises(UsageError, match="body 1 of 3 has updated when it ran again, and had not before"):
        calls.make(BodyCall(body, (), {}))


def test_collectives_between_two_calls_of_a_window_are_off() -> None:
    driver = PlayedDriver()
    calls, _ = played(driver, Numbers())
    for _ in range(3):
        calls.make(BodyCall(lambda: None, (), {}))
    assert driver.modes == [Mode.BETWEEN, Mode.DIRECT, Mode.BETWEEN, Mode.DIRECT]


def test_a_process_that_joins_late_is_alone_until_its_first_call() -> None:
    driver = PlayedDriver(joined_late=True)
    calls, _ = played(driver, Numbers())
    assert calls.position().step == 0
    assert driver.modes == [Mode.LOOPBACK]
    calls.make(BodyCall(lambda: None, (), {}))
    assert driver.modes == [Mode.LOOPBACK, Mode.DIRECT, Mode.BETWEEN]


def test_bodies_and_loop_draw_each_their_own_numbers() -> None:
    numbers = Numbers()
    random = BodiesRandom(numbers)  # type: ignore[arg-type] # what it needs of an engine
    seen = []
    for drawn in (0, 0, 3, 0, 1):
        for _ in range(drawn):
            numbers.draw()
        with random:
            seen.append(numbers.state)
            numbers.draw()
    assert seen == [b"0", b"1", b"2", b"3", b"4"]  # as if the loop had drawn nothing
    assert numbers.state == b"6"  # two by bodies, while nobody else had drawn; four by the loop


@pytest.mark.parametrize("asked", [1, 2])
@pytest.mark.parametrize("agent", [True, False])
def test_the_stream_of_bodies_begins_at_the_first_position(asked: int, agent: bool) -> None:
    """With an agent and without: a loop draws behind it, as to begin a pass over a DataLoader does."""
    numbers = Numbers()
    random = BodiesRandom(numbers)  # type: ignore[arg-type] # what it needs of an engine
    calls = Calls(PlayedDriver(), random) if agent else PlainCalls(random)  # type: ignore[arg-type] # likewise
    for _ in range(asked):
        calls.position()
        numbers.draw()
    assert calls.make(BodyCall(numbers.random_state, (), {})) == b"0"


@pytest.mark.parametrize("agent", [True, False])
def test_a_body_that_asks_for_the_position_leaves_the_loops_numbers_alone(agent: bool) -> None:
    """It stands in the bodies' stream already."""
    numbers = Numbers()
    random = BodiesRandom(numbers)  # type: ignore[arg-type] # what it needs of an engine
    calls = Calls(PlayedDriver(), random) if agent else PlainCalls(random)  # type: ignore[arg-type] # likewise
    calls.make(BodyCall(numbers.draw, (), {}))
    for _ in range(7):
        numbers.draw()
    calls.make(BodyCall(lambda: (numbers.draw(), calls.position()), (), {}))
    assert numbers.state == b"8"


def test_without_an_agent_bodies_are_called() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with rt.Session(model=model, optimizer=optimizer) as session:
        assert session.position == (0, False)
        assert session.call(lambda a, b=0: a + b, 1, b=2) == 3
        assert session.position.step == 1
        with pytest.raises(ZeroDivisionError):
            session.call(lambda: 1 // 0)
        with pytest.raises(UsageError, match="within a body"):
            session.call(session.call, print)
        with pytest.raises(UsageError, match="one loop"):
            next(session.steps(3))
    with rt.Session(model=model, optimizer=optimizer) as session:
        next(session.steps(3))
        with pytest.raises(UsageError, match="one loop"):
            session.call(print)
    with rt.Session(model=model, optimizer=optimizer, loader=[1]) as session:
        with pytest.raises(UsageError, match="leave out"):
            session.call(print)


class Batches:
    """A trainer that gives its own batches."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return 1

    def step(self, x: int) -> int:
        return x


def test_a_generator_is_no_body_and_a_method_of_what_can_be_gone_through_is() -> None:
    generator = (each for each in range(3))
    with pytest.raises(UsageError, match=r"session\.call hands a generator to its body"):
        KeptCall(BodyCall(generator.send, (None,), {}), look)
    assert KeptCall(BodyCall(Batches().step, (3,), {}), lambda *_, plain: b"").make() == 3


class Kept:
    """An object of the user's."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Strict:
    """Has what it has, and raises what it likes for the rest."""

    __slots__ = ("unset", "x")

    def __init__(self, x: Any) -> None:
        self.x = x

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Counted(list[Any]):
    """Of its items how many were taken."""

    taken = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.taken += 1
            yield each


class Slots:
    """Without a dict."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


def test_a_look_tells_one_batch_from_another() -> None:
    batch = torch.arange(1000.0)
    assert look(((batch,), {})) == look(((batch.clone(),), {}))
    assert look(([batch],)) != look(([batch + 1],))
    assert look({"x": batch}) != look({"x": batch.double()})
    assert look(batch.reshape(10, 100)) != look(batch)
    assert look(batch.numpy()) != look(batch.numpy()[::-1])
    assert look((torch.zeros(0), torch.tensor(1.0), torch.randn(3).bfloat16(), torch.ones(2, 3).t())) != b""
    assert look({"n": 3, "of": ["words", None]}) != look({"n": 4, "of": ["words", None]})
    assert look({"n": 3, "of": ["words", None]}, plain=False) == look(object()) == look([]) == b""
    for kind in (Kept, Slots, Strict, lambda x: SimpleNamespace(x=x), lambda x: SimpleNamespace(inner=[Kept(x)])):
        assert look(kind(batch)) == look(kind(batch.clone())) != look(kind(batch + 1)), kind
    assert look(Kept([SimpleNamespace(x=batch)])) != look(Kept([SimpleNamespace(x=batch + 1)]))
    assert look(Kept(Kept(batch))) == look(Kept(torch.nn.Linear(2, 2))) == b"", "what it knows need not be data"
    many = Counted({"x": [number]} for number in range(10_000))
    assert look(Kept(many)) == look(Kept(many)) != b""
    assert many.taken <= 2 * 501, "a look is taken at each call"
    assert look(many) != look(many[:-1]), "what a body is given itself is data"
    ring = SimpleNamespace(x=batch)
    ring.itself = ring
    assert look(ring) == look(SimpleNamespace(x=batch))
    for generator in (torch.Generator(), np.random.default_rng(0), random.Random(0)):
        before = look(generator), look([], [generator])
        assert before[0] != b"" != before[1]
        getattr(generator, "random", lambda of=generator: torch.rand(1, generator=of))()
        assert look(generator) != before[0]
        assert look([], [generator]) != before[1]
    assert look([], [object(), 3, [batch]]) == b"", "of variables data alone"
    on_device = torch.zeros(3, device="meta")
    before = look([on_device]), look([on_device], plain=False), look([], [on_device])
    on_device.add_(1)
    assert look([on_device]) != before[0], "what can't be read has a count of its writes"
    assert (look([on_device], plain=False), look([], [on_device])) == before[1:], "which is this process's alone"
    with torch.inference_mode():
        assert look([torch.zeros(3, device="meta")]) != b"", "and this has none"
    assert look([], [batch]) != look([], [batch + 1])
