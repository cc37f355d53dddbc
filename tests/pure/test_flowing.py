"""What flows from one step into the next unregistered is refused; what is only left is nobody's business."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import DataLoader, RandomSampler  # noqa: E402
from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: E402

from resilient_train.errors import UsageError  # noqa: E402
from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.checks.flowing import Flowing  # noqa: E402
from resilient_train.session.carried import Carried  # noqa: E402
from resilient_train.session.step import Steps  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("as_in_a_fork")]
WINDOWS = 14
REFUSED_IN = 6
"""The first window makes tables; in the five behind the next one it is seen."""


class Loop:
    """A model, and what a program keeps. The program looks for ``flowing`` as a Session's windows do."""

    def __init__(self, **registered: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(3, 3)
        self.gru = nn.GRU(3, 3)
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.gru.parameters()], lr=0.1)
        self.flowing = Flowing(Objects((self.model, self.gru), (self.optimizer,), rank_extra=registered))
        self.given: Collection[Any] | None = ()
        self.flowing.attach(lambda: self.given)
        self.number = -1

    def windows(self) -> Iterator[Any]:
        """As the head of a loop is: the next window begins when the body is left."""
        numbers: Iterator[Any] = self._windows()
        return Steps(numbers, lambda: None)

    def _windows(self) -> Iterator[int]:
        try:
            for self.number in range(WINDOWS):
                self.flowing.begin()
                yield self.number
        finally:
            self.flowing.close()

    def train(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.flowing.check()
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch() -> torch.Tensor:
    return torch.randn(2, 3)


def hidden_state(loop: Loop) -> None:
    hidden = torch.zeros(1, 1, 3)
    for _ in loop.windows():
        out, hidden = loop.gru(batch().unsqueeze(1), hidden)
        hidden = hidden.detach()
        loop.train(out.sum())


def fetched_ahead(loop: Loop) -> None:
    inputs = batch()
    for _ in loop.windows():
        out = loop.model(inputs)
        inputs = batch()
        loop.train(out.pow(2).sum())


def fetched_ahead_into_a_list(loop: Loop) -> None:
    ahead = {"x": [batch()]}
    for _ in loop.windows():
        loop.train(loop.model(ahead["x"].pop()).pow(2).sum())
        ahead["x"].append(batch())


def running_mean(loop: Loop) -> None:
    mean = torch.ones(())
    for _ in loop.windows():
        loss = loop.model(batch()).pow(2).mean()
        loop.train(loss / mean)
        mean = 0.9 * mean + 0.1 * loss.detach()


def running_mean_in_place(loop: Loop) -> None:
    mean = torch.ones(())
    for _ in loop.windows():
        loss = loop.model(batch()).pow(2).mean()
        loop.train(loss / mean)
        mean.mul_(0.9).add_(loss.detach(), alpha=0.1)


def queue_of_negatives(loop: Loop) -> None:
    queue = torch.randn(3, 8)
    for number in loop.windows():
        out = loop.model(batch())
        loop.train(functional.cross_entropy(out @ queue, torch.tensor([0, 1])))
        queue[:, number % 8] = out[0].detach()


def attribute_of_the_model(loop: Loop) -> None:
    loop.model.memory = torch.zeros(2, 3)
    for _ in loop.windows():
        out = loop.model(batch()) * loop.model.memory + 1
        loop.model.memory = out.detach()
        loop.train(out.sum())


def weights_of_ones_own(loop: Loop) -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    for _ in loop.windows():
        loop.train((loop.model(batch()) @ weight).pow(2).sum())
        weight = (weight - 0.1 * weight.grad).detach().requires_grad_()


class Scaled(torch.autograd.Function):
    """What it needs is an attribute of its ``ctx``, as in many a program."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        ctx.by = by
        return value * by

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.by, None


def in_a_function_of_ones_own(loop: Loop) -> None:
    scale = torch.ones(2, 3)
    for _ in loop.windows():
        out = loop.model(batch())
        loop.train(Scaled.apply(out, scale).sum())
        scale = out.detach() * 0.5


def in_a_gradient_of_a_gradient(loop: Loop) -> None:
    inputs = batch().requires_grad_()
    for _ in loop.windows():
        (gradient,) = torch.autograd.grad(loop.model(inputs).pow(2).sum(), inputs, create_graph=True)
        inputs = batch().requires_grad_()
        loop.train(gradient.pow(2).sum())


_FLOWS = "gradients are computed from what the step before has written, and is not registered: "
FLOWS = {
    hidden_state: "hidden",
    fetched_ahead: "inputs",
    fetched_ahead_into_a_list: "ahead['x'][0]",
    running_mean: "mean",
    running_mean_in_place: "mean",
    queue_of_negatives: "queue",
    attribute_of_the_model: "self.model.memory",
    weights_of_ones_own: "weight",
    in_a_function_of_ones_own: "scale",
    in_a_gradient_of_a_gradient: "inputs",
}


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """To look at all of a test session's takes 0.1 s."""
    gc.freeze()
    yield
    gc.unfreeze()


def refused(program: Callable[[Loop], None]) -> str:
    """With which words, in the window in which it can be known."""
    loop = Loop()
    with pytest.raises(UsageError) as found:
        program(loop)
    assert loop.number == REFUSED_IN
    return str(found.value)


@pytest.mark.parametrize("program", FLOWS, ids=lambda each: each.__name__)
def test_a_flow_is_refused_by_its_name(program: Callable[[Loop], None]) -> None:
    assert refused(program).startswith(f"{_FLOWS}{FLOWS[program]}. A step")


def batches(number: int = 64) -> DataLoader[Any]:
    return DataLoader([batch()[0] for _ in range(number)], batch_size=2)


def iterator_of_a_loader(loop: Loop) -> None:
    over = iter(batches())
    for _ in loop.windows():
        loop.train(loop.model(next(over)).pow(2).sum())


def loader_without_end(loop: Loop) -> None:
    def endless(loader: Any) -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    endlessly = endless(batches())
    for _ in loop.windows():
        loop.train(loop.model(next(endlessly)).pow(2).sum())


def zipped_with_the_loader(loop: Loop) -> None:
    for _, inputs in zip(loop.windows(), batches(), strict=False):
        loop.train(loop.model(inputs).pow(2).sum())


def zipped_with_a_list(loop: Loop) -> None:
    for _, inputs in zip(loop.windows(), [batch() for _ in range(20)], strict=False):
        loop.train(loop.model(inputs).pow(2).sum())


def enumerated(loop: Loop) -> None:
    data = [batch() for _ in range(20)]
    for number, _ in enumerate(loop.windows()):
        loop.train(loop.model(data[number]).pow(2).sum())


GO_ON = {
    iterator_of_a_loader: "an iterator of a DataLoader (list) ",
    loader_without_end: "an iterator of a DataLoader (list) ",
    zipped_with_the_loader: "an iterator of a DataLoader (list) ",
    zipped_with_a_list: "what zip() goes through, a list_iterator, ",
    enumerated: "what enumerate() counts ",
}


@pytest.mark.parametrize("program", GO_ON, ids=lambda each: each.__name__)
def test_what_goes_on_by_itself_is_refused(program: Callable[[Loop], None]) -> None:
    assert refused(program).startswith(f"{GO_ON[program]}goes on in each step, and is not registered")


def all_made_anew(loop: Loop) -> None:
    for _ in loop.windows():
        loop.train(loop.model(batch()).pow(2).sum())


def results_are_left(loop: Loop) -> None:
    total, kept = torch.zeros(()), []
    for _ in loop.windows():
        out = loop.model(batch())
        loss = out.pow(2).sum()
        loop.train(loss)
        total = total + loss.detach()
        kept += [loss, out]


def batch_fetched_between_steps(loop: Loop) -> None:
    for _ in loop.windows():
        inputs = batch()
        loop.train(loop.model(inputs).pow(2).sum())


def table_made_once(loop: Loop) -> None:
    @functools.lru_cache
    def table() -> torch.Tensor:
        return torch.arange(3.0)

    for _ in loop.windows():
        loop.train((loop.model(batch()) * table()).sum())


def table_that_grows(loop: Loop) -> None:
    table = torch.zeros(0)
    for number in loop.windows():
        length = [1, 2, 3, 2, 4, 1][number % 6]
        if len(table) < length:
            table = torch.arange(float(length))
        loop.train((loop.model(batch())[:, :1] * table[:length]).sum())


def buffer_that_is_filled_in_place(loop: Loop) -> None:
    inputs = torch.zeros(2, 3)
    for _ in loop.windows():
        inputs.copy_(batch())
        loop.train(loop.model(inputs).pow(2).sum())


def table_written_in_front_of_its_use(loop: Loop) -> None:
    weights = torch.ones(3)
    for number in loop.windows():
        weights.fill_(1 / (1 + number))
        loop.train((loop.model(batch()) * weights).sum())


def inference_tensors_are_left(loop: Loop) -> None:
    kept = []
    for _ in loop.windows():
        with torch.inference_mode():
            kept.append(loop.model(batch()))
        loop.train(loop.model(batch()).sum())


def module_called_under_vmap(loop: Loop) -> None:
    kept = []
    for _ in loop.windows():
        loop.train(torch.func.vmap(loop.model)(batch()).pow(2).sum())
        kept.append(torch.func.vmap(lambda each: kept.append(each) or each)(batch()))


def graph_used_twice(loop: Loop) -> None:
    for _ in loop.windows():
        loss = loop.model(batch()).pow(2).sum()
        loss.backward(retain_graph=True)
        loop.train(loss)


def checkpointed_and_offloaded(loop: Loop) -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    for _ in loop.windows():
        out = checkpoint(inner, loop.model(batch()), use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            loop.train(inner(out).pow(2).sum())


def cache_by_length(loop: Loop) -> None:
    """Of so many lengths a step that each makes some, and has some of the step before."""

    @functools.lru_cache
    def table(length: int) -> torch.Tensor:
        return torch.arange(float(length))

    for number in loop.windows():
        loop.train(sum((loop.model(batch())[:, :1] * table(1 + number + more)).sum() for more in range(4)))


def enumerated_elsewhere(loop: Loop) -> None:
    others = enumerate(iter([batch()] * WINDOWS))
    for _ in loop.windows():
        loop.train(loop.model(batch()).sum())
        next(others)


def drawn_from_the_step(loop: Loop) -> None:
    for number in loop.windows():
        own = np.random.default_rng((1, number))
        also = torch.Generator().manual_seed(number)
        loop.train((loop.model(torch.randn(2, 3, generator=also)) * own.random()).sum())


def evaluates_in_each_step(loop: Loop) -> None:
    loader = batches()
    for _ in loop.windows():
        loop.train(loop.model(batch()).sum())
        with torch.no_grad():
            [loop.model(each) for each in loader]


def evaluates_now_and_then(loop: Loop) -> None:
    over = iter(batches())
    for number in loop.windows():
        loop.train(loop.model(batch()).sum())
        if number % 4 == 3:
            loop.model(next(over))


class Odd(dict[Any, Any]):
    """Not what one expects, in a variable of the script."""

    __module__ = None  # type: ignore[assignment]

    def items(self) -> Any:
        raise RuntimeError("not yours")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def odd_objects_in_variables(loop: Loop) -> None:
    odd = Odd({object(): [Odd()], 1: functools.partial(print)})
    for _ in loop.windows():
        loop.train(loop.model(batch()).sum())
    assert odd


def sparse_results_are_left(loop: Loop) -> None:
    kept = []
    for _ in loop.windows():
        kept.append(torch.eye(3).to_sparse())
        loop.train(functional.relu(loop.model(batch())).sum())


CLEAN = (
    all_made_anew,
    results_are_left,
    batch_fetched_between_steps,
    table_made_once,
    table_that_grows,
    buffer_that_is_filled_in_place,
    table_written_in_front_of_its_use,
    inference_tensors_are_left,
    module_called_under_vmap,
    graph_used_twice,
    checkpointed_and_offloaded,
    cache_by_length,
    enumerated_elsewhere,
    drawn_from_the_step,
    evaluates_in_each_step,
    evaluates_now_and_then,
    odd_objects_in_variables,
    sparse_results_are_left,
)


@pytest.mark.parametrize("program", CLEAN, ids=lambda each: each.__name__)
def test_what_does_not_flow_is_let_be(program: Callable[[Loop], None]) -> None:
    loop = Loop()
    program(loop)
    assert loop.number == WINDOWS - 1


def test_what_is_registered_may_flow() -> None:
    carried = Carried(torch.zeros(1, 1, 3))
    loop = Loop(carried=carried)
    for _ in loop.windows():
        out, hidden = loop.gru(batch().unsqueeze(1), carried.take())
        carried.put(hidden.detach())
        loop.train(out.sum())
    assert loop.number == WINDOWS - 1


class Memory:
    """A registered object whose ``state_dict()`` copies."""

    def __init__(self) -> None:
        self.value = torch.ones(2, 3)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def test_so_may_what_a_registered_object_holds_and_shows_copies_of() -> None:
    memory = Memory()
    loop = Loop(memory=memory)
    for _ in loop.windows():
        out = loop.model(batch()) * memory.value
        memory.value = out.detach()
        loop.train(out.sum())
    assert loop.number == WINDOWS - 1


class Remembers(nn.Linear):
    """Publishes what is in an attribute, as a copy."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.memory = {"of": torch.ones(2, 3)}

    def get_extra_state(self) -> Any:
        return self.memory["of"].numpy().copy()

    def set_extra_state(self, state: Any) -> None:
        self.memory["of"] = torch.from_numpy(state)


@pytest.mark.parametrize("registered", [False, True])
def test_so_may_what_a_module_publishes(registered: bool) -> None:
    """As a model, or as what is registered beside it."""
    loop, remembers = Loop(), nn.Sequential(Remembers())
    objects = Objects((loop.model, loop.gru), (loop.optimizer,))
    objects = objects._replace(extra={"it": remembers}) if registered else objects._replace(models=(remembers,))
    loop.flowing = Flowing(objects)
    loop.flowing.attach(lambda: ())
    for _ in loop.windows():
        out = loop.model(batch()) * remembers[0].memory["of"]
        remembers[0].memory["of"] = out.detach()
        loop.train(out.sum())
    assert loop.number == WINDOWS - 1


class Strange(type):
    """No key of a dictionary."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("not with me")

    __hash__ = None  # type: ignore[assignment]


class Unbound(metaclass=Strange):
    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")


class KeepsOdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.proxy, ctx.itself = Unbound(), []
        ctx.itself.append(ctx.itself)
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2


def test_odd_objects_cost_nobody_a_step() -> None:
    loop, state = Loop(), torch.ones(2, 3)
    unbound = [Unbound(), object.__new__(_BaseDataLoaderIter)]
    loop.given = unbound
    with pytest.raises(UsageError, match="registered: state"):
        for _ in loop.windows():
            out = KeepsOdd.apply(loop.model(batch())) * state
            state = out.detach()
            loop.train(out.sum())
    assert unbound


def test_the_values_of_variables_end_as_ever() -> None:
    """Who reads the variables of a function that runs keeps them alive, before Python 3.13."""
    loop = Loop()
    gone = []
    for _ in loop.windows():
        kept = batch()
        gone.append(weakref.ref(kept))
        loop.train(loop.model(kept).sum())
    assert [each() is None for each in gone] == [True] * (WINDOWS - 1) + [False]


def ahead_of_time() -> Iterator[torch.Tensor]:
    following = batch()
    while True:
        now, following = following, batch()
        yield now


def test_so_may_a_batch_that_its_loader_has_fetched_ahead() -> None:
    loop, loader = Loop(), ahead_of_time()
    for _ in loop.windows():
        inputs = next(loader)
        loop.given = [inputs, loader]
        loop.train(loop.model(inputs).pow(2).sum())
    assert loop.number == WINDOWS - 1


def test_the_next_loaders_second_batch_is_given_too() -> None:
    loop, loader = Loop(), ahead_of_time()
    for _ in loop.windows():
        first, loop.given = next(loader), [loader]
        loop.given = [first, loader]
        loop.model(first).pow(2).sum().backward()
        second = next(loader)
        loop.given = [first, second, loader]
        loop.train(loop.model(second).pow(2).sum())
    assert loop.number == WINDOWS - 1


def test_a_loader_that_is_given_may_go_on() -> None:
    loop, shuffled = Loop(), torch.Generator()
    loader = DataLoader([batch()[0] for _ in range(64)], 2, sampler=RandomSampler(range(64), generator=shuffled))
    over = iter(loader)
    loop.given = [loader, over]
    for _ in loop.windows():
        loop.train(loop.model(next(over)).pow(2).sum())
        torch.rand((), generator=shuffled)
    assert loop.number == WINDOWS - 1


def test_a_loop_that_calls_for_its_bodies_is_not_looked_at() -> None:
    loop = Loop()
    loop.given = None
    hidden_state(loop)
    assert loop.number == WINDOWS - 1


def test_behind_a_redo_it_is_looked_for_anew() -> None:
    loop = Loop()
    hidden = torch.zeros(1, 1, 3)
    with pytest.raises(UsageError, match="registered: hidden"):
        for number in loop.windows():
            if number == 3:
                loop.flowing.forget()
                loop.flowing.begin()
            out, hidden = loop.gru(batch().unsqueeze(1), hidden)
            hidden = hidden.detach()
            loop.train(out.sum())
    assert loop.number == 3 + REFUSED_IN


def test_torchs_own_function_is_back_where_nothing_flows() -> None:
    autograd: Any = torch.autograd
    was, loop = autograd._engine_run_backward, Loop()
    seen = set()
    for number in loop.windows():
        loop.train(loop.model(batch()).pow(2).sum())
        if autograd._engine_run_backward is not was:
            seen.add(number)
    assert seen == {2}
    assert autograd._engine_run_backward is was
