"""What a rank alone has, packed: the same bytes whether it was looked at or taken apart, and never old ones."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - likewise
from torch import nn  # noqa: E402 - only where torch is

from resilient_train.errors import ConfigError, ProtocolError, StateError  # noqa: E402
from resilient_train.frameworks.roles import GIVEN_HERE, NOTHING_OF_ITS_OWN, NOTHING_WRITTEN, TailsWrite, WrittenInTail  # noqa: E402
from resilient_train.frameworks.torch.kept import buffers as buffers_module  # noqa: E402
from resilient_train.frameworks.torch.kept.buffers import Buffers, key_of  # noqa: E402
from resilient_train.frameworks.torch.rank_state import TorchRankState  # noqa: E402
from resilient_train.frameworks.torch.tensors.leaves import pack, unpack  # noqa: E402


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def train(net: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        net(torch.randn(6, 4))


def plainly(state: TorchRankState) -> bytes:
    moved = state.buffers.moved()
    return pack({"buffers": state.buffers.changed(), **({"moved": moved} if moved else {}), "extra": {}})


def test_the_bytes_are_those_of_the_slow_way() -> None:
    net = model()
    state = TorchRankState((net,), {})
    for _ in range(3):
        train(net)
        assert state.packed() == plainly(state)


def test_while_nothing_changes_nothing_is_packed() -> None:
    net = model()
    state = TorchRankState((net,), {})
    train(net)
    first = state.packed()
    assert state.packed() is first
    train(net)
    assert state.packed() != first


def test_batch_norms_silent_writes_are_seen() -> None:
    """They don't tell the version counter."""
    net = model()
    state = TorchRankState((net,), {})
    seen = set()
    for _ in range(4):
        train(net)
        seen.add(state.packed())
    assert len(seen) == 4


@pytest.mark.parametrize("how", ["another object", "another place", "another buffer besides"])
def test_buffers_that_are_exchanged_are_seen(how: str) -> None:
    net: Any = model()
    net[0].register_buffer("mask", torch.ones(3))
    state = TorchRankState((net,), {})
    train(net)
    before = state.packed()
    if how == "another object":
        net[1].running_mean = torch.full((4,), 7.0)
    elif how == "another place":
        net[1].running_mean.data = torch.full((4,), 7.0)
    else:
        net[0].mask.zero_()
    assert state.packed() == plainly(state) != before


def test_no_buffers_are_no_bytes() -> None:
    assert TorchRankState((nn.Linear(2, 2),), {}).packed() == b""


def test_what_the_user_calls_its_own_comes_along() -> None:
    counter, other = Counter(), Counter()
    counter.value = 5
    packed = TorchRankState((model(),), {"counter": counter}).packed()
    TorchRankState((model(),), {"counter": other}).restore(packed)
    assert other.value == 5


def test_a_rollback_takes_first_changes_back() -> None:
    net: Any = nn.Linear(4, 4)
    net.register_buffer("mask", torch.ones(3))
    state = TorchRankState((net,), {})
    state.keep()
    assert state.packed() == b""
    net.mask.zero_()
    state.rollback()
    assert net.mask.tolist() == [1.0, 1.0, 1.0]


def test_a_rollback_brings_the_begin_of_the_window_back() -> None:
    net = model()
    state = TorchRankState((net,), {})
    train(net)
    begin = state.packed()
    state.keep()
    train(net, 2)
    assert state.packed() != begin
    state.rollback()
    assert state.packed() == begin
    assert torch.equal(unpack(begin)["buffers"]["0.1.running_mean"], net[1].running_mean)


def test_a_buffer_on_a_device_or_in_pieces_goes_the_slow_way() -> None:
    net: Any = nn.Linear(4, 4)
    net.register_buffer("table", torch.arange(12.0).reshape(3, 4).t())
    state = TorchRankState((net,), {})
    net.table.add_(1)
    assert state.packed() == plainly(state)
    assert state._same is None


def test_what_a_lost_tail_has_written_of_its_own_is_named() -> None:
    """A replica's tail tells what code behind the update writes."""
    (mine, theirs, new), counters = (model() for _ in range(3)), (Counter(), Counter(), Counter())
    own, replica, successor = (
        TorchRankState((net,), {"counter": counter}) for net, counter in zip((mine, theirs, new), counters, strict=True)
    )
    train(mine)
    train(theirs, 2)
    published, before = own.packed(), replica.packed()
    assert successor.restore(published, replica.written_since(before)) == (), "nothing is written there"
    counters[1].value = 7
    assert replica.written_since(before) == WrittenInTail(b"", b"", ("rank_state['counter']",)), "nothing of modules"
    train(theirs)
    behind = successor.restore(published, replica.written_since(before))
    assert behind[0] == "rank_state['counter']"
    assert any("running_mean" in each for each in behind[1:])
    assert successor.packed() == published


def test_what_tails_are_seen_to_write_apart_no_replica_gives() -> None:
    """Though both had the same in front of it. And what the lost rank's tails alone write, no replica's can tell."""
    nets: list[Any] = [nn.Linear(2, 2) for _ in range(3)]
    for net in nets:
        for name in ("own", "even", "alone"):
            net.register_buffer(name, torch.ones(2))
    own, replica, successor = (TorchRankState((net,), {"counter": Counter()}) for net in nets)
    own.buffers.look(closely=True)
    front = own.packed(), replica.packed()
    for value, net in enumerate(nets[:2]):
        net.even += 1
        net.own += value + 1
    nets[0].alone += 1
    own._extra["counter"].value = 5
    around = [(before, each.packed()) for before, each in zip(front, (own, replica), strict=True)]
    seen = own.tail_wrote(*around[0], around[1:])
    assert seen == TailsWrite(("0..alone", "0..own"), ("0..alone", "rank_state['counter']"))
    assert replica.tail_wrote(*around[1], around[:1]) == TailsWrite(("0..own",), ())
    assert own.tail_wrote(*around[0], []) == NOTHING_OF_ITS_OWN, "nobody is known to have another"

    for net in nets[:2]:
        net.own.fill_(3)
    published, before = own.packed(), replica.packed()
    for net in nets[:2]:
        net.even += 1
        net.own += 1
    tail = replica.written_since(before)
    assert successor.restore(published, tail) == (), "it was the same, and is not known to be the rank's own"
    assert successor.restore(published, tail._replace(seen=seen)) == (
        "0..own",
        "0..alone",
        "rank_state['counter']",
    )
    assert (nets[2].own.tolist(), nets[2].even.tolist()) == ([3, 3], nets[1].even.tolist())


def test_what_rank_0_has_broadcast_in_a_lost_tail_comes_from_it() -> None:
    """Its own stay as they were: ``given_by`` alone tells. What the tail has written besides is named, as ever."""
    nets = mine, theirs, _ = [model() for _ in range(3)]
    own, root, successor = (TorchRankState((net,), {}, rank) for rank, net in zip((1, 0, 1), nets, strict=True))
    train(mine)
    train(theirs, 2)
    published, before = own.packed(), root.packed()
    root.tail_begins()
    root.given_by(0, [buffer for name, buffer in theirs.named_buffers() if "running" in name])
    tail = root.written_since(before)
    keys = sorted(key for key in root.buffers.own() if "running" in key)
    assert tail.given == tuple((key, GIVEN_HERE) for key in keys) != ()
    assert successor.restore(published, tail) == ()
    assert successor.packed() != published
    held, given = successor.buffers.changed(), root.buffers.changed()
    assert all(torch.equal(held[key], given[key]) for key in keys)
    with torch.no_grad():
        theirs.get_buffer(keys[0].replace("0.", "", 1)).add_(0)
    assert root.written_since(before).given == tail.given[1:], "and where it puts back what was there, others may, too"
    root.keep()
    with torch.no_grad():
        theirs.get_buffer(keys[1].replace("0.", "", 1)).add_(0)
    assert root.written_since(before).given == tail.given[1:], "the next body writes what it likes"
    train(theirs)
    assert root.written_since(before).given == (), "it has written them itself since"
    assert successor.restore(published, root.written_since(before)) != ()
    root.tail_begins()
    assert root.written_since(root.packed()) == NOTHING_WRITTEN


def test_of_what_a_lost_rank_itself_had_broadcast_nothing_is_lost() -> None:
    """A replica holds the lost rank's by then, and did not before; a third rank's place would get none of it."""
    (mine, theirs), packed = (model(), model()), b""
    for rank, names in ((1, True), (2, False)):
        own, replica = TorchRankState((mine,), {}, rank), TorchRankState((theirs,), {}, 0)
        train(mine)
        train(theirs, 2)
        packed, before = own.packed(), replica.packed()
        running = [each for name, each in theirs.named_buffers() if "running" in name]
        replica.given_by(2, running)
        for here, there in zip(theirs.buffers(), mine.buffers(), strict=True):
            here.copy_(there)
        tail = replica.written_since(before)
        assert {giver for _, giver in tail.given} == {2}
        assert any("running" in each for each in own.restore(packed, tail)) is names
        assert own.packed() == packed


def test_another_ranks_buffers_are_those_it_had_published() -> None:
    mine, theirs = model(), model()
    own, other = TorchRankState((mine,), {}), TorchRankState((theirs,), {})
    train(mine)
    train(theirs, 2)
    packed, published, buffers = own.packed(), other.packed(), [*mine.buffers()]
    found = own.of_another(published, packed, buffers)
    assert found is not None
    assert all(torch.equal(one, two) for one, two in zip(found, theirs.buffers(), strict=True))
    fresh = model()
    assert TorchRankState((fresh,), {}).of_another(b"", b"", [*fresh.buffers()]) is None, "it has published none"
    train(mine)
    assert own.of_another(published, packed, buffers) is None, "this one has written its own since, so has the other"


class Observed(nn.Module):
    """Its buffers are written by kernels that tell no version counter; the large one is not small."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(4))
        self.register_buffer("high", torch.zeros(4))
        self.register_buffer("wide", torch.zeros(200_000))

    def observe(self, *names: str) -> None:
        for name in names:
            getattr(self, name).data.add_(1)


def test_a_buffer_that_is_written_past_its_counter_is_found_late() -> None:
    net = Observed()
    buffers = Buffers((net,))
    buffers.look(closely=True)
    for _ in range(3):
        buffers.look(closely=False)
        assert buffers.own() == {}
    net.observe("low")
    buffers.look(closely=False)
    assert list(buffers.own()) == ["0..low"]
    buffers.look(closely=False)
    net.observe("wide")
    buffers.look(closely=False)
    assert list(buffers.own()) == ["0..low"], "256 KiB together, else it would take its time in each step"
    net.observe("high")
    buffers.look(closely=False)
    assert list(buffers.own()) == ["0..high", "0..low"], "the large one is not compared beside it"
    buffers.look(closely=True)
    assert list(buffers.own()) == ["0..high", "0..low", "0..wide"]


def test_a_large_one_that_a_tail_has_written_is_not_put_back_to_its_first_value() -> None:
    """What is not looked at in each window may have changed long before the one that is redone."""
    net = Observed()
    state = TorchRankState((net,), {})
    state.buffers.look(closely=False)
    net.observe("wide")
    state.buffers.look(closely=False)
    state.keep()
    net.observe("low")
    state.buffers.look(closely=False)
    state.rollback()
    assert (net.low.sum(), net.wide.mean()) == (0, 1)


def test_what_lies_in_pieces_is_glanced_at_and_what_lies_nowhere_is_not() -> None:
    net = Observed()
    net.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    net.register_buffer("none", torch.zeros(0))
    buffers = Buffers((net,))
    buffers.look(closely=False)
    assert list(buffers._small) == ["0..low", "0..high", "0..turned"]
    net.low.data = torch.ones(4)  # what lay there may be gone
    buffers.look(closely=False)
    assert list(buffers.own()) == ["0..low"]
    net.turned.data[1, 1] = 7
    buffers.look(closely=False)
    assert list(buffers.own()) == ["0..low", "0..turned"]


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError):
        TorchRankState((model(),), {}).restore(b"\x93 no state")


def test_what_the_module_looks_at_is_what_it_says() -> None:
    """A buffer of size 0 lies nowhere."""
    assert not buffers_module.lies_here(torch.empty(0))


class Cooling(nn.Linear):
    """Its heat is in no buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.heat, self.seen = 1.0, collections.Counter[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.heat *= 0.97
        self.seen[len(x)] += 1
        return super().forward(x) * self.heat

    def get_extra_state(self) -> Any:
        return {"heat": self.heat, "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.heat, self.seen = state["heat"], state["seen"]


def test_extra_state_of_modules_is_a_ranks_own() -> None:
    net, other, newcomer = (nn.Sequential(nn.Linear(4, 4), Cooling()) for _ in range(3))
    state = TorchRankState((net,), {})
    train(net)
    begin, was = state.packed(), net[1].get_extra_state()["heat"]
    state.keep()
    train(net, 2)
    assert state.packed() != begin
    state.rollback()
    assert (net[1].heat, state.packed()) == (was, begin)
    TorchRankState((other,), {}).restore(begin)
    TorchRankState((newcomer,), {}).adopt(begin)
    assert other[1].heat == newcomer[1].heat == was
    assert other[1].seen.most_common() == [(6, 1)]


def test_extra_state_that_cannot_be_carried_names_its_module() -> None:
    net = nn.Sequential(Cooling())
    net[0].heat = {1, 2}
    with pytest.raises(StateError, match=r"'extra_state\.0\.0\.heat' is a set"):
        TorchRankState((net,), {}).packed()


class Banks(nn.Module):
    """Buffers that a forward pass enlarges, makes, fills and takes away."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(rows, 3))
        self.register_buffer("cache", None)
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.zeros(3), persistent=False)
        self.table += 1
        self.bank = torch.cat([self.bank, x])
        self.cache = x if self.cache is None else None
        self.mask = None
        return x

    def told(self) -> dict[str, Any]:
        return {name: None if each is None else each.tolist() for name, each in self._buffers.items()}


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_buffers_of_another_shape_are_put_back(rows: int) -> None:
    """With one row they were filled with copies of it, and nobody was told."""
    net = Banks(rows)
    state = TorchRankState((net,), {})
    for step in range(3):
        before, begin = net.told(), state.packed()
        state.keep()
        for _ in range(2):  # a redo that is cut as well
            net(torch.full((2, 3), float(step)))
            if step == 2:
                net(torch.ones(1, 3))
            after = net.told()
            state.rollback()
            assert net.told() == before
            assert state.packed() == begin or not step, "from now on they count as the rank's own"
        net(torch.full((2, 3), float(step)))
        assert (net.told() == after) is (step < 2)
    assert "table" not in net.state_dict()


def test_a_buffer_whose_memory_comes_back_is_seen() -> None:
    """Two forward passes in a step: the second one's buffer may get the memory that the first one's had."""
    net: Any = nn.Linear(2, 2)
    net.register_buffer("mean", torch.zeros(4))
    state = TorchRankState((net,), {})
    assert state.packed() == b""
    for _ in range(8):
        for _ in range(2):
            net.mean = net.mean * 0.9 + 1
        assert state.packed() == plainly(state) != b""


class Masked(nn.Module):
    """Its buffer is a row of a table that no Session knows, another one in each pass; or it is given the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table = how, [torch.full((3,), float(row)) for row in range(5)]
        self.register_buffer("mask", self.table[0][:])

    def forward(self, row: int) -> None:
        if self.how == "data":
            self.mask.data = self.table[row]
        elif self.how == "set_":
            self.mask.set_(self.table[row])
        elif self.how == "registered":
            self.register_buffer("mask", self.table[row])
        else:
            self.mask = self.table[row]

    def intact(self) -> bool:
        return all(torch.equal(each, torch.full((3,), float(row))) for row, each in enumerate(self.table))


@pytest.mark.parametrize("begun", [0, 1, 3])
@pytest.mark.parametrize("how", ["assigned", "registered", "data", "set_"])
def test_what_a_buffer_shares_its_memory_with_is_not_written(how: str, begun: int) -> None:
    """``mask.copy_(...)`` went into whatever row stood there: of a survivor, and of a process that took a place."""
    net = Masked(how)
    state = TorchRankState((net,), {})
    for row in range(begun):
        net(row)
        state.keep()
    state.keep()
    found = net.mask.data_ptr()
    net(3)
    state.rollback()
    assert net.intact()
    assert net.mask.data_ptr() == found
    net(4)
    other = Masked(how)
    TorchRankState((other,), {}).restore(state.packed())
    assert other.intact()
    assert torch.equal(other.mask, net.mask)


def test_a_conjugate_is_what_it_says() -> None:
    """Its bytes are those of the other one."""
    net: Any = nn.Linear(2, 2)
    net.register_buffer("wave", torch.tensor([1 + 2j]))
    state, other = TorchRankState((net,), {}), copy.deepcopy(net)
    net.wave = torch.tensor([3 + 4j]).conj()
    TorchRankState((other,), {}).restore(state.packed())
    assert other.wave.item() == 3 - 4j
    state.keep()
    net.wave = torch.tensor([5 + 6j]).conj()
    state.rollback()
    assert net.wave.item() == 3 - 4j


def test_one_that_goes_and_one_that_comes() -> None:
    """There are as many as before."""
    net: Any = nn.Linear(2, 2)
    net.register_buffer("first", torch.ones(2))
    state = TorchRankState((net,), {})
    state.keep()
    del net.first
    net.register_buffer("second", torch.zeros(2))
    assert list(state.buffers.changed()) == ["0..second"]
    state.rollback()
    assert list(dict(net.named_buffers())) == ["first"]
    assert torch.equal(net.first, torch.ones(2))


def test_an_expanded_one_is_put_back() -> None:
    net: Any = nn.Linear(2, 2)
    net.register_buffer("wide", torch.ones(1).expand(8))
    state = TorchRankState((net,), {})
    net.wide = torch.full((1,), 2.0).expand(8)
    packed = state.packed()
    state.keep()
    net.wide = torch.full((1,), 3.0).expand(8)
    state.rollback()
    assert torch.equal(net.wide, torch.full((8,), 2.0))
    other: Any = nn.Linear(2, 2)
    other.register_buffer("wide", torch.ones(1).expand(8))
    TorchRankState((other,), {}).restore(packed)
    assert torch.equal(other.wide, net.wide)


def test_a_small_buffer_that_nobody_makes_equal_is_the_ranks_own() -> None:
    """A script may have built another one on each rank; a replica's state comes with its own."""

    def built(site: float) -> tuple[Any, TorchRankState]:
        net: Any = nn.Linear(2, 2)
        net.register_buffer("site", torch.full((3,), site))
        net.register_buffer("large", torch.full((20_000,), site))
        state = TorchRankState((net,), {})
        state.buffers.claim((net,))
        return net, state

    _, lost = built(1.0)
    net, state = built(1.0)
    published = lost.packed()
    site = net.site
    state.buffers.renew({"0..site": ()})  # the replica's is another tensor by now
    net.site.fill_(2.0)
    net.large.fill_(2.0)
    state.packed()
    state.restore(published)
    assert net.site is site
    assert (net.site[0], net.large[0]) == (1.0, 2.0), "of large ones it is as it was"
    state.keep()
    begun = state.packed()
    net.site.mul_(3)
    assert state.packed() != begun
    state.rollback()
    assert net.site[0] == 1.0
    assert state.packed() == begun


def test_what_is_as_built_again_is_published_again() -> None:
    """Another one has changed meanwhile, so as many are quiet as before."""
    net: Any = nn.Linear(2, 2)
    net.register_buffer("first", torch.ones(3))
    net.register_buffer("second", torch.ones(3))
    state = TorchRankState((net,), {})
    state.buffers.claim((net,))
    as_built = state.buffers.published()
    net.first.fill_(2)
    assert torch.equal(state.buffers.published()["0..first"], net.first)
    state.buffers.restore({"0..first": torch.ones(3), "0..second": torch.full((3,), 5.0)})
    found = state.buffers.published()
    assert found.keys() == as_built.keys()
    assert [each[0] for each in found.values()] == [1.0, 5.0]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_buffers_that_ddp_makes_equal_are_not_claimed() -> None:
    net: Any = nn.Linear(2, 2)
    net.register_buffer("site", torch.ones(3))
    for broadcasts in (True, False):
        wrapper = nn.parallel.DistributedDataParallel(net, broadcast_buffers=broadcasts)
        state = TorchRankState((wrapper,), {})
        state.buffers.claim((wrapper,))
        assert (state.packed() == b"") is broadcasts


def test_what_can_not_be_published_is_named() -> None:
    class Half:
        def state_dict(self) -> dict[str, int]:
            return {}

    for thing, name in ((collections.deque(), "collections.deque"), ({}, "dict"), (Half(), ".*Half")):
        with pytest.raises(ConfigError, match=rf"rank_state\['queue'\] is a {name} without state_dict\(\) and load_"):
            TorchRankState((), {"queue": thing})


def test_zeros_have_signs() -> None:
    """They are equal, and what is divided by them is not."""
    net: Any = nn.Linear(2, 2)
    net.register_buffer("zero", torch.zeros(2))
    state = TorchRankState((net,), {})
    net.zero.add_(1).mul_(-0.0)
    state.keep()
    net.zero.mul_(-1)
    state.rollback()
    assert torch.signbit(net.zero).all()


def test_buffers_keep_their_order() -> None:
    """DDP sends them in it, and each gets what stands in the same place of rank 0's list. One that is taken away and
    registered again stands last.
    """
    nets: list[Any] = [nn.Linear(2, 2) for _ in range(2)]
    for net in nets:
        for at, name in enumerate(("first", "second", "third")):
            net.register_buffer(name, torch.full((2,), float(at)))
    state, successor = (TorchRankState((net,), {}) for net in nets)
    net = nets[0]

    def again(name: str, value: float) -> None:
        delattr(net, name)
        net.register_buffer(name, torch.full((2,), value))

    again("first", 7.0)
    state.keep()
    packed = state.packed()
    again("second", 8.0)
    state.rollback()
    assert [*net._buffers] == ["second", "third", "first"]
    net.register_buffer("made", torch.zeros(2))
    again("third", 9.0)
    state.keep()
    successor.buffers.to_be_ordered(key_of(0, name) for name, _ in net.named_buffers())
    successor.restore(state.packed())
    assert [*nets[1]._buffers] == ["second", "first", "made", "third"]
    successor.keep()
    delattr(nets[1], "second")
    nets[1].register_buffer("second", torch.zeros(2))
    successor.rollback()
    assert [*nets[1]._buffers] == ["second", "first", "made", "third"]
    successor.restore(packed)
    assert nets[1].first.tolist() == [7, 7]


def test_a_write_that_changes_nothing_makes_nobody_publish() -> None:
    """DDP raises the versions of several kinds of buffers while it sends them, and lowers them again."""
    net: Any = nn.Linear(2, 2)
    for name, value in (("mask", torch.ones(2)), ("late", torch.ones(2))):
        net.register_buffer(name, value)
    state = TorchRankState((net,), {})
    for _ in range(2):
        net.mask.copy_(torch.ones(2))
        assert state.packed() == b""
    net.late.copy_(torch.ones(2))
    net.late.add_(1)
    assert [*state.buffers.changed()] == ["0..late"]
