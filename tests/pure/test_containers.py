"""State whose containers are of classes of their own: who takes it up may ask for these."""

from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from resilient_train.frameworks.accelerator import Host
from resilient_train.frameworks.roles import Objects, Sources
from resilient_train.frameworks.torch.kept.watched_state import WatchedState
from resilient_train.frameworks.torch.rank_state import TorchRankState
from resilient_train.frameworks.torch.state import TorchState
from resilient_train.frameworks.torch.tensors.containers import copy_tree, dressed, worn
from resilient_train.frameworks.torch.tensors.leaves import TENSORS, pack, state_of, unpack
from resilient_train.state.transfer import Span, view
from resilient_train.state.tree import flatten


class Wanting(OrderedDict[str, Any]):
    """Its constructors can't be called by somebody who does not know it."""

    __slots__ = ("why",)

    def __new__(cls, why: str) -> Self:
        assert isinstance(why, str)
        return super().__new__(cls)

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


class Row(list[Any]):
    def __init__(self, *, name: str) -> None:
        super().__init__()
        self.name = name


class Pair(NamedTuple):
    first: Any
    second: Any


class Versioned(nn.Linear):
    """As quantization observers do: another value where nobody says from which version it is."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, *rest: Any) -> None:
        assert meta.get("version") == 2, meta
        super()._load_from_state_dict(state, prefix, meta, *rest)


def odd_tree() -> dict[str, Any]:
    wanting, row = Wanting("b"), Row(name="r")
    wanting["z"], wanting["a"] = torch.ones(2), Counter([4, 4, 5])
    row.append({"x": torch.zeros(1)})
    named = defaultdict(list, {"k": [1]})
    return {"wanting": wanting, "row": row, "named": named, "pair": Pair(1, Counter("a")), "size": torch.Size([2, 3])}


def check_classes(tree: Any) -> None:
    assert type(tree["wanting"]) is Wanting
    assert tree["wanting"].why == "b"
    assert list(tree["wanting"]) == ["z", "a"]
    assert tree["wanting"]["a"] == Counter({4: 2, 5: 1})
    assert list(tree["wanting"]["a"].elements()) == [4, 4, 5]
    assert type(tree["row"]) is Row
    assert tree["row"].name == "r"
    assert tree["named"]["k"] == [1]
    assert tree["named"]["new"] == []
    assert tree["pair"].second.most_common() == [("a", 1)]
    assert tree["size"].numel() == 6


def test_a_copy_has_the_classes_and_nothing_in_common() -> None:
    tree = odd_tree()
    copied = copy_tree(tree)
    check_classes(copied)
    tree["wanting"]["z"].zero_()
    tree["wanting"]["a"].clear()
    tree["row"][0]["x"].add_(1)
    tree["row"].append(1)
    tree["named"]["k"].append(2)
    check_classes(copied)
    assert copied["wanting"]["z"].tolist() == [1, 1]
    assert copied["row"][0]["x"].tolist() == [0]
    assert len(copied["row"]) == 1


def test_what_has_travelled_is_dressed_as_the_receivers() -> None:
    told = unpack(pack(odd_tree()))
    assert type(told["wanting"]) is dict
    check_classes(dressed(told, odd_tree()))


def test_what_the_receiver_has_not_stays_plain() -> None:
    told = {"a": {"b": [{"c": 1}]}, "n": (1,)}
    assert dressed(told, Counter()) == told
    assert dressed(told, {"a": {"b": []}, "n": [1]}) == told
    assert dressed(told, None) == told


def scheduled(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parts = [LinearLR(optimizer, total_iters=4), MultiStepLR(optimizer, [6, 9])]
    return optimizer, SequentialLR(optimizer, parts, milestones=[4])


def state(**objects: Any) -> TorchState:
    given = {"models": (), "optimizers": (), **objects}
    return TorchState(Objects(**given), TorchRankState((), {}), Host())


def rates(optimizer: Any, scheduler: Any) -> list[float]:
    found = []
    for _ in range(14):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def hand_on(sources: Sources, receiver: TorchState) -> None:
    def fetch(spans: list[Span]) -> None:
        for here, there in zip(spans, sources.spans, strict=True):
            view(here)[:] = view(there)

    receiver.receive(sources.manifest, fetch, sources.digest)


@pytest.mark.parametrize("fused", [False, True])
def test_moments_lie_as_their_parameters_do(*, fused: bool) -> None:
    """A fused kernel goes through memory, whatever the indices say."""
    models = [nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=fused) for model in models]
    models[0](torch.randn(2, 3, 5, 5)).pow(2).mean().backward()
    optimizers[0].step()
    old, new = (state(models=(m,), optimizers=(o,)) for m, o in zip(models, optimizers, strict=True))
    hand_on(old.sources(), new)
    assert new.fingerprint().digest() == old.fingerprint().digest()
    here, there = (o.state[m.weight]["exp_avg"] for m, o in zip(models, optimizers, strict=True))
    assert here.stride() == there.stride() == models[0].weight.stride()
    assert not here.is_contiguous()
    for model, optimizer in zip(models, optimizers, strict=True):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_buffer_that_has_moved_lies_as_it_does_there() -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]
    for model in models:
        model.register_buffer("axes", torch.eye(4))
    states = [TorchState(Objects((m,), ()), TorchRankState((m,), {}), Host()) for m in models]
    for each in states:
        each._rank_state.packed()
    models[0].axes = torch.linalg.eigh(torch.eye(4))[1]
    states[0]._rank_state.packed()
    hand_on(states[0].sources(), states[1])
    assert models[1].axes.stride() == models[0].axes.stride() == (1, 4)


@pytest.mark.parametrize(("of", "told"), [("parameter", "its parameter"), ("moment", "another one"), ("", "")])
def test_state_of_an_optimizer_in_anothers_memory_is_told(of: str, told: str) -> None:
    """Another process would have two. Views of one large tensor that lie beside each other do no harm."""
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    both = torch.zeros(2, 3, 2)
    memories = {"parameter": model.weight.detach(), "moment": both, "": torch.zeros(3, 2)}
    optimizer.state[model.weight] = {"first": both[0], "second": both[1], "held": memories[of], "none": torch.ones(0)}
    optimizer.state[model.bias] = {"none": torch.ones(0), "step": torch.tensor(1)}
    found = state(models=(model,), optimizers=(optimizer,)).outgrown()
    assert ("keeps 'held' in the memory of " + told in found) if told else found == ""


def test_gradients_that_a_script_has_laid_in_one_tensor_stay_there() -> None:
    """All start again: what the loop zeroes and reduces is that tensor."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    flat = nn.Parameter(torch.zeros(sum(each.numel() for each in model.parameters())))
    holder = nn.Module()
    holder.flat, flat.grad = flat, torch.ones_like(flat)
    at = 0
    for each in model.parameters():
        each.grad = flat.grad[at : at + each.numel()].view_as(each)
        at += each.numel()
    other = nn.Linear(1, 1)
    other.weight.grad = torch.ones(1, 1)
    of = state(models=(holder, model, other))
    of._drop_gradients()
    assert other.weight.grad is None
    assert flat.grad is not None
    assert not flat.grad.any()
    model(torch.ones(1, 2)).sum().backward()
    assert flat.grad.any()


def test_a_scheduler_goes_on_behind_a_redo() -> None:
    """``MultiStepLR.milestones`` is a Counter: as a dict it fails at the first milestone, hours later."""
    optimizer, scheduler = scheduled(nn.Linear(1, 1))
    held = state(optimizers=(optimizer,), schedulers=(scheduler,))
    held.restore_small(held.small_copy())
    assert rates(optimizer, scheduler) == rates(*scheduled(nn.Linear(1, 1)))


def test_a_scheduler_goes_on_in_another_process() -> None:
    models = nn.Linear(1, 1), nn.Linear(1, 1)
    (optimizer, scheduler), (other, others) = map(scheduled, models)
    sources = state(models=models[:1], optimizers=(optimizer,), schedulers=(scheduler,)).sources()
    hand_on(sources, state(models=models[1:], optimizers=(other,), schedulers=(others,)))
    assert rates(other, others) == rates(*scheduled(nn.Linear(1, 1)))


@pytest.mark.parametrize("size", [4, 512])
def test_a_module_is_told_its_versions(size: int) -> None:
    ema = Versioned(64, size)
    watched = WatchedState("ema", ema)
    watched.begin(whole=True)
    watched.put_back()
    sources = state(extra={"ema": ema}).sources()
    other = Versioned(64, size)
    hand_on(sources, state(extra={"ema": other}))
    assert torch.equal(other.weight, ema.weight)
    own = TorchRankState((), {"ema": ema})
    own.keep()
    own.rollback()
    assert flatten(state_of(ema), TENSORS)[0] == flatten(state_of(other), TENSORS)[0]


@pytest.mark.parametrize(
    "tree", [odd_tree(), {"it": odd_tree(), "plain": [1, (2, [torch.ones(3)])]}, {"size": torch.Size([3, 2])}]
)
def test_classes_are_remembered_without_what_they_hold(tree: Any) -> None:
    plain, _ = flatten(tree, TENSORS)
    classes = worn(tree)
    again = dressed(unpack(pack(tree)), classes)
    assert flatten(again, TENSORS)[0] == plain
    assert shapes(again) == shapes(tree)
    assert not list(tensors_of(classes)), "what is remembered over a step holds no memory of the body's"


def test_plain_containers_need_no_memory() -> None:
    assert worn({"a": [1, {"b": (2, torch.ones(1))}], "c": None}) is None


def shapes(tree: Any) -> Any:
    """A tree's classes, from the outermost inwards."""
    if isinstance(tree, dict):
        return type(tree), {key: shapes(item) for key, item in tree.items()}
    return (type(tree), [shapes(item) for item in tree]) if isinstance(tree, (list, tuple)) else type(tree)


def tensors_of(tree: Any) -> Any:
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        if isinstance(item, torch.Tensor):
            yield item
        yield from tensors_of(item)
