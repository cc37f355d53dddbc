"""What a window found of the shared state, when its bodies write before the update: torch's tensors, without a job."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.kept.kept_state import KeptState, Modes, zero
from resilient_train.frameworks.torch.tensors.containers import copy_tree


class Plain:
    """State of the user's, of this many elements and a number."""

    def __init__(self, elements: int) -> None:
        self.held, self.count = torch.zeros(elements), 0

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held[:] = state["held"]
        self.count = state.get("count", 0)
        self.more = list(state.get("more", ()))


def write(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.add_(1)


def silently(parameter: torch.Tensor) -> None:
    parameter.data.add_(1)


def another(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data + 1


def exchange(parameter: torch.Tensor) -> None:
    """And back, exactly."""
    with torch.no_grad():
        parameter.mul_(2)
        parameter.mul_(0.5)


class Job:
    def __init__(self, **extra: Any) -> None:
        self.model = nn.Linear(4, 4)
        self.extra = extra
        self.kept = KeptState(Objects((self.model,), (), extra=extra))

    @property
    def weight(self) -> torch.Tensor:
        return self.model.weight

    def window(self, body: Callable[[], None] = lambda: None) -> list[str]:
        """A whole one. Returns what was seen."""
        self.kept.begin({})
        body()
        self.kept.look()
        found = self.kept.found()
        self.kept.forget()
        return found.names if found is not None else []


@pytest.mark.parametrize("how", [write, silently])
def test_what_the_first_window_writes_is_put_back_from_the_second_on(how: Callable[[torch.Tensor], None]) -> None:
    job = Job()
    assert not job.kept.has_copy(job.weight)
    assert job.window(lambda: how(job.weight)) == ["model.0.weight"]
    before = job.weight.detach().clone()
    job.kept.begin({})
    assert job.kept.has_copy(job.weight)
    assert not job.kept.has_copy(job.model.bias)
    how(job.weight)
    job.kept.cut()
    how(job.weight)
    job.kept.put_back()
    assert not job.kept.lost
    assert torch.equal(job.weight, before)
    how(job.weight)
    job.kept.put_back()
    assert torch.equal(job.weight, before), "a recovery that is cut by another one puts back twice"


def test_what_a_later_window_writes_past_the_version_counters() -> None:
    """LoRA's merge, ``weight.data += ...``: one word of each parameter is looked at."""
    job = Job()
    for _ in range(5):
        assert job.window() == []
    assert not job.kept.looks_closely
    job.model.weight.requires_grad_(False)
    assert job.window(lambda: silently(job.weight)) == ["model.0.weight"]
    job.kept.begin({})
    before = job.weight.detach().clone()
    silently(job.weight)
    job.kept.put_back()
    assert not job.kept.lost
    assert torch.equal(job.weight, before)
    silently(job.model.bias)
    job.kept.put_back()
    assert job.kept.lost == "model.0.bias", "the first that writes it has no copy"


def test_memory_that_a_body_lets_go_is_not_looked_at() -> None:
    job = Job()
    for _ in range(5):
        job.window()
    job.kept.begin({})
    job.weight.untyped_storage().resize_(0)
    job.kept.look()
    job.weight.untyped_storage().resize_(64)
    write(job.weight)
    job.kept.look()
    assert job.kept.lost == "model.0.weight"
    job.kept.cut()


@pytest.mark.parametrize("windows", [0, 5])
def test_other_memory_needs_no_copy(windows: int) -> None:
    """Nobody has written to that which was there: also where it comes back, and somebody else's stays as it is."""
    job = Job()
    for _ in range(windows):
        job.window(lambda: another(job.weight))
    before, others = job.weight.detach().clone(), torch.ones(4, 4)
    job.kept.begin({})
    job.weight.data = others
    job.kept.cut()
    job.weight.data = others
    for _ in range(2):
        job.kept.put_back()
        assert not job.kept.lost
        assert torch.equal(job.weight, before)
        another(job.weight)
    assert torch.equal(others, torch.ones(4, 4))
    assert not job.kept.early_parameters()


@pytest.mark.parametrize("windows", [0, 5])
def test_a_module_in_the_place_of_another_one(windows: int) -> None:
    job = Job()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    job.kept = KeptState(Objects((model,), ()))
    for _ in range(windows):
        model[0] = nn.Linear(4, 4)
        assert not job.window()
    first, before = model[0], model[0].weight.detach().clone()
    job.kept.begin({})
    model[0] = nn.Linear(4, 4)
    job.kept.put_back()
    assert not job.kept.lost
    assert model[0] is first
    assert torch.equal(first.weight, before)


def test_a_parameter_in_two_places() -> None:
    """A checkpoint has it once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    kept = KeptState(Objects((model,), ()))
    kept.begin({}, whole=True)
    before = model[0].weight.detach().clone()
    write(model[0].weight)
    models = [dict(model.named_parameters())]
    names = list(models[0])
    kept.parameters(models)
    kept.contents(models)
    assert list(models[0]) == names == ["0.weight", "0.bias", "1.bias"]
    assert torch.equal(models[0]["0.weight"], before)
    kept.put_back()
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, before)


def test_what_is_written_for_the_first_time_is_lost() -> None:
    job = Job()
    for _ in range(5):
        assert not job.window()
    job.kept.begin({})
    write(job.weight)
    job.kept.put_back()
    assert job.kept.lost == "model.0.weight"
    job.kept.forget()
    job.kept.begin({})
    assert not job.kept.lost


@pytest.mark.parametrize("how", [write, silently, another, exchange])
def test_what_is_written_behind_a_cut_body_is_put_back_without_having_been_seen(
    how: Callable[[torch.Tensor], None],
) -> None:
    job = Job()
    for _ in range(5):
        job.window()
    before = job.weight.detach().clone()
    job.kept.begin({})
    for _ in range(2):
        job.kept.cut()
        how(job.weight)
        job.kept.put_back()
        assert not job.kept.lost
        assert torch.equal(job.weight, before)
    job.kept.forget()
    assert not job.window(), "and it is not early"


def test_a_parameter_that_is_another_one() -> None:
    """It needs no copy: the one that was there has its content still."""
    job = Job()
    for _ in range(5):
        job.window()
    job.kept.begin({})
    weight, before = job.weight, job.weight.detach().clone()
    job.model.weight = nn.Parameter(torch.zeros(4, 4))
    job.kept.put_back()
    assert not job.kept.lost
    assert job.weight is weight
    assert torch.equal(weight, before)


def test_a_parameter_that_gets_another_type() -> None:
    job = Job()
    job.window(lambda: write(job.weight))
    job.window()
    job.model.double()
    job.weight.data.fill_(1 / 3)
    before = job.weight.detach().clone()
    job.kept.begin({})
    job.weight.data = job.weight.data.half()
    job.kept.put_back()
    assert not job.kept.lost
    assert torch.equal(job.weight, before)
    assert job.weight.dtype == before.dtype


def test_tensors_that_torch_does_not_count_are_always_kept() -> None:
    extra = Plain(10)
    with torch.inference_mode():
        extra.held = torch.zeros(100_000)
    job = Job(extra=extra)
    for _ in range(4):
        job.window()
    job.kept.begin({})
    with torch.inference_mode():
        extra.held.add_(1)
        job.kept.put_back()
    assert not job.kept.lost
    assert not extra.held.any()


def test_what_an_update_that_was_cut_has_written_is_not_early() -> None:
    job = Job()
    for _ in range(3):
        job.window()
    job.kept.begin({})
    job.kept.look()
    write(job.weight)
    job.kept.put_back(intact=False)
    assert not job.kept.lost
    assert not job.kept.early_parameters()


@pytest.mark.parametrize("elements", [10, 100_000])
def test_the_users_state(elements: int) -> None:
    extra = Plain(elements)
    job = Job(extra=extra)

    def body() -> None:
        extra.held.add_(1)
        extra.count += 1

    names = job.window(body)
    assert names == ([] if elements == 10 else ["state['extra']"])
    job.kept.begin({})
    body()
    job.kept.cut()
    body()
    job.kept.put_back()
    assert not job.kept.lost
    assert (extra.count, extra.held[0].item()) == (1, 1.0)


def test_a_large_state_that_is_written_behind_a_cut_body_is_put_back_without_having_been_seen() -> None:
    extra = Plain(100_000)
    job = Job(extra=extra)
    for _ in range(3):
        assert not job.window()
    job.kept.begin({})
    job.kept.cut()
    extra.held.add_(1)
    job.kept.put_back()
    assert not job.kept.lost
    assert not extra.held.any()


def test_a_large_state_whose_state_dict_is_a_copy_is_always_kept() -> None:
    extra = Plain(100_000)
    extra.state_dict = lambda: {"held": extra.held.clone(), "count": extra.count}
    job = Job(extra=extra)
    for _ in range(4):
        job.window()
    job.kept.begin({})
    write(extra.held)
    job.kept.put_back()
    assert not job.kept.lost
    assert not extra.held.any()


@pytest.mark.parametrize("windows", [0, 1, 2, 5])
@pytest.mark.parametrize("what", ["number", "tensor", "array", "time", "entry", "module", "part"])
def test_a_large_state_is_seen_to_be_written_whenever_that_begins(what: str, windows: int) -> None:
    """In its first windows there is a copy; later the first write is lost, and the second one has one."""
    extra: Any = Plain(100_000)
    if what == "array":
        extra.held = np.zeros(100_000)
    if what == "time":
        extra.held = np.zeros(100_000, "datetime64[s]")
    if what in ("module", "part"):
        extra = nn.Linear(200, 200)
        extra.part = nn.Linear(200, 200)
    extra.more = []
    if what == "entry":
        extra.state_dict = lambda: {"held": extra.held, "more": extra.more}
    job = Job(extra=extra)

    def body() -> None:
        if what == "number":
            extra.count += 1
        elif what == "tensor":
            extra.held = extra.held + 1
        elif what in ("array", "time"):
            extra.held[3] += 1
        elif what == "entry":
            extra.more.append(1.5)
        elif what == "part":
            extra.part = nn.Linear(200, 200)
        else:
            extra.weight = nn.Parameter(extra.weight + 1)

    for _ in range(windows):
        assert not job.window()
    job.kept.begin({})
    body()
    job.kept.look()
    assert job.kept.lost == ("" if windows < 2 else "state['extra']")
    assert job.kept.found() is not None
    job.kept.forget()
    job.kept.begin({})
    before = copy.deepcopy(extra.state_dict())
    body()
    job.kept.cut()
    body()
    job.kept.put_back()
    assert not job.kept.lost
    if what != "entry":
        assert str(extra.state_dict()) == str(before)


def test_a_small_state_that_grows_large_in_a_body() -> None:
    extra = Plain(10)
    extra.more: list[torch.Tensor] = []
    extra.state_dict = lambda: {"more": list(extra.more)}
    extra.load_state_dict = lambda state: setattr(extra, "more", list(state["more"]))
    job = Job(extra=extra)
    for turn in range(600):
        job.kept.begin({})
        for _ in range(2):
            extra.more.append(torch.tensor(1.0))
            job.kept.look()
            job.kept.put_back()
            assert not job.kept.lost
            assert len(extra.more) == turn
        extra.more.append(torch.tensor(1.0))
        job.kept.look()
        job.kept.found()
        job.kept.forget()


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


def test_arrays_and_named_tuples_are_copied() -> None:
    held = Pair(torch.zeros(3), [np.zeros(3)])
    copied = copy_tree({"held": held})
    held.first.add_(1)
    held.second[0] += 1
    assert not copied["held"].first.any()
    assert not copied["held"].second[0].any()


def test_what_lives_on_is_never_put_back() -> None:
    extra = Plain(10)
    extra.resilient_lives_on = True
    job = Job(extra=extra)
    job.kept.begin({})
    extra.count = 7
    job.kept.put_back()
    assert extra.count == 7


def test_an_update_behind_a_copy_of_all_is_not_seen() -> None:
    job = Job()
    for _ in range(3):
        job.window()
    job.kept.begin({})
    job.kept.seal()
    write(job.weight)
    job.kept.cut()
    job.kept.put_back()
    assert not job.kept.lost


def test_a_snapshot_is_of_what_the_window_found() -> None:
    extra = Plain(10)
    job = Job(extra=extra)
    job.window(lambda: write(job.weight))
    job.kept.begin({})
    weight, bias, before = job.weight, job.model.bias, job.weight.detach().clone()
    write(job.weight)
    job.model.bias = nn.Parameter(torch.ones(4))
    extra.count = 5
    models = [dict(job.model.named_parameters())]
    job.kept.parameters(models)
    assert (models[0]["weight"], models[0]["bias"]) == (weight, bias)
    job.kept.contents(models)
    assert torch.equal(models[0]["weight"], before)
    assert job.kept.kept_states()["extra"]["count"] == 0


def test_a_replacement_knows_what_its_replica_has_seen() -> None:
    extra = Plain(100_000)
    job = Job(extra=extra)
    job.window(lambda: (write(job.weight), write(extra.held)))
    new = Job(extra=Plain(100_000))
    new.kept.learn(job.kept.early_parameters(), job.kept.early_states())
    before = new.weight.detach().clone()
    new.kept.begin({})
    write(new.weight)
    write(new.extra["extra"].held)
    new.kept.put_back()
    assert not new.kept.lost
    assert torch.equal(new.weight, before)
    assert not new.extra["extra"].held.any()


def test_without_memory_for_the_copy_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.window(lambda: write(job.weight))

    def clone(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("900 MB are missing")

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    job.kept.begin({})
    monkeypatch.undo()
    assert job.kept.early_parameters()
    write(job.weight)
    job.kept.put_back()
    assert job.kept.lost == "model.0.weight"


def test_a_window_that_will_be_run_again_keeps_all() -> None:
    """Also what is written in it for the first time; and only there."""
    extra = Plain(100_000)
    job = Job(extra=extra)
    for _ in range(3):
        job.window()
    before = job.weight.detach().clone()
    job.kept.begin({}, whole=True)
    for _ in range(2):
        write(job.weight)
        write(extra.held)
        job.kept.look()
        job.kept.put_back()
        assert not job.kept.lost
        assert torch.equal(job.weight, before)
        assert not extra.held.any()
    job.kept.forget()
    job.kept.begin({})
    write(extra.held)
    job.kept.put_back()
    assert job.kept.lost == "state['extra']"


def test_a_copy_of_an_older_window_is_never_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two is early, with no memory for its copy; the other one was kept in the window before."""
    job = Job()
    job.window(lambda: write(job.weight))
    clone = torch.Tensor.clone

    def none_for_the_weight(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2:
            raise torch.OutOfMemoryError("900 MB are missing")
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", none_for_the_weight)
    job.kept.begin({}, whole=True)
    job.kept.forget()
    write(job.model.bias)
    now = job.model.bias.detach().numpy().copy()
    job.kept.begin({})
    job.kept.put_back()
    assert job.model.bias.detach().numpy().tolist() == now.tolist()


def test_nothing_is_put_back_when_no_window_is_open() -> None:
    job = Job(extra=Plain(10))
    job.window()
    write(job.weight)
    job.extra["extra"].count = 9
    job.kept.cut()
    job.kept.put_back()
    assert not job.kept.lost
    assert job.extra["extra"].count == 9


def test_the_objects_without_models() -> None:
    kept = KeptState(Objects((), (), extra={"thing": SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)}))
    kept.begin({})
    kept.look()
    assert kept.found() is None


class Cloning(Plain):
    """Each look at its state is a copy, that lies elsewhere."""

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held.clone(), "count": self.count}


@pytest.mark.parametrize("kind", [Plain, Cloning])
@pytest.mark.parametrize("elements", [10, 100_000])
@pytest.mark.parametrize("windows", [0, 1])
def test_a_mark_says_whether_something_was_written(kind: type[Plain], elements: int, windows: int) -> None:
    """Not by memory that is somebody else's by now. Where that can't be told, two looks in a row already differ."""
    thing = kind(elements)
    job = Job(thing=thing)
    for _ in range(windows):
        job.kept.begin({})
        job.kept.forget()
    first, again = job.kept.marks()["thing"], job.kept.marks()["thing"]
    others = [torch.empty(elements) for _ in range(8)]
    untold = kind is Cloning and elements > 10 and not windows
    assert again.same(first) != untold
    assert job.kept.marks()["thing"].same(again) != untold
    thing.held.add_(1)
    assert not job.kept.marks()["thing"].same(again)
    assert len(others) == 8


def test_modes_are_put_back_with_gradients_of_zeros_where_there_were_some() -> None:
    job = Job()
    job.model.weight.grad = held = torch.ones(4, 4)
    job.model.bias.requires_grad_(False)
    job.kept.begin({})
    job.model.eval()
    job.model.weight.requires_grad_(False)
    job.model.bias.requires_grad_(True).grad = torch.ones(4)
    gradients = job.kept.gradients()
    job.model.zero_grad(set_to_none=True)
    job.kept.put_back()
    zero(gradients)
    assert job.model.training
    assert (job.model.weight.requires_grad, job.model.bias.requires_grad) == (True, False)
    assert job.model.weight.grad is held, "the same memory: a step's worth of pages is not asked for again"
    assert not held.any()
    assert job.model.bias.grad is None


def test_another_process_is_told_modes_as_they_are_at_the_head_of_a_window() -> None:
    """Not those of an evaluation in the tail of the step before."""
    job, other = Job(), Job()
    job.kept.begin({})
    job.kept.forget()
    job.model.eval()
    job.model.bias.requires_grad_(False)
    job.model.weight.grad = torch.ones(4, 4)
    assert job.kept.modes(within=True) == Modes((), (), ())
    told = job.kept.modes(within=False)
    assert told == Modes(((0, ""),), ((0, "bias"),), ((0, "weight"),))
    other.model.bias.grad = torch.ones(4)  # of a pass that the script makes before its loop
    other.kept.take_modes(told)
    assert (other.model.training, other.model.bias.requires_grad) == (False, False)
    assert other.model.weight.grad is not None
    assert not other.model.weight.grad.any()
    assert other.model.bias.grad is None
    other.kept.begin({})
    assert other.kept.modes(within=False) == told


def test_what_was_otherwise_in_another_process() -> None:
    def kept(rate: float, *, evaluates: bool, frozen: bool) -> KeptState:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        found = KeptState(Objects((model,), (torch.optim.SGD(model.parameters(), 0.1),), (), None, {}, {}))
        found.modes(within=False)
        model[1].p = rate
        model.train(not evaluates)
        model[0].bias.requires_grad_(not frozen)
        return found

    one, other = kept(0.1, evaluates=False, frozen=True), kept(0.4, evaluates=True, frozen=False)
    assert one.otherwise(one.modes(within=False)) == []
    assert other.otherwise(one.modes(within=False)) == one.otherwise(other.modes(within=False)) != []
    assert other.otherwise(one.modes(within=False)) == [
        "model.0.0.bias.requires_grad",
        "model.0.0.training",
        "model.0.1.p",
        "model.0.1.training",
        "model.0.training",
    ]
