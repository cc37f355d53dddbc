"""Collectives before the loop, in the process that records them and in the one that is answered."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch import nn  # noqa: E402
from torch._C import _distributed_c10d as c10d  # noqa: E402
from torch._C._distributed_c10d import _create_work_from_future  # noqa: E402

from resilient_train import config, standby_stage  # noqa: E402
from resilient_train.errors import ConfigError  # noqa: E402
from resilient_train.frameworks import set_up_recall  # noqa: E402
from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.checks.unregistered import Unregistered  # noqa: E402
from resilient_train.frameworks.torch.communication.call_codec import bytes_of, header_of  # noqa: E402
from resilient_train.frameworks.torch.communication.clique import Clique  # noqa: E402
from resilient_train.frameworks.torch.communication.collective_results import VERBS, run_alone  # noqa: E402
from resilient_train.frameworks.torch.communication.ddp_traffic import Traffic  # noqa: E402
from resilient_train.frameworks.torch.communication.set_up import SetUpCollectives  # noqa: E402
from resilient_train.frameworks.torch.tensors.storages import registered  # noqa: E402
from resilient_train.protocol.messages import SetUp  # noqa: E402
from resilient_train.state.set_up_record import Recorded, SetUpRecord  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("as_in_a_fork")]
BIG = 20_000


def one(value: float = 1.0) -> torch.Tensor:
    return torch.tensor([value])


def options(root: int) -> Any:
    chosen = c10d.BroadcastOptions()
    chosen.rootRank = root
    return chosen


class Group:
    """Of two ranks; the other one adds 10, when ``end`` says so. Alone, it is answered by nobody."""

    group_name = "world"

    def __init__(self, me: int = 0, size: int = 2, *, alone: bool = False) -> None:
        self.me, self.members, self.alone = me, size, alone
        self.under_way: list[Callable[[], None]] = []

    def rank(self) -> int:
        return self.me

    def size(self) -> int:
        return self.members

    def run(self, verb: str, args: tuple[Any, ...]) -> dist.Work:
        if self.alone:
            return run_alone(verb, self.me, self.members, args)
        future: torch.futures.Future[Any] = torch.futures.Future()

        def end() -> None:
            if verb == "allreduce":
                args[0][0].add_(10.0)
            future.set_result(list(args[0]) if isinstance(args[0], list) else [])

        self.under_way.append(end)
        work: dist.Work = _create_work_from_future(future)
        return work

    def end(self) -> None:
        while self.under_way:
            self.under_way.pop(0)()


def link(*, joining: bool) -> config.AgentLink:
    return config.AgentLink("socket", 0, 2, 0, joining, "run")


@pytest.fixture(autouse=True)
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "read_link", lambda: link(joining=False))


def nothing() -> frozenset[Any]:
    return frozenset()


def later(monkeypatch: pytest.MonkeyPatch, packed: bytes) -> SetUpCollectives:
    """In a process that takes the place of the one that has recorded this."""
    monkeypatch.setattr(config, "read_link", lambda: link(joining=True))
    monkeypatch.setattr(set_up_recall, "recall", lambda _: SetUp(packed))
    monkeypatch.setattr(set_up_recall, "stray", lambda _, text: SystemExit(text))
    return SetUpCollectives()


def test_a_result_is_taken_before_the_caller_can_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up, group, value = SetUpCollectives(), Group(), one(2.0)
    work = set_up.issue(group, "allreduce", ([value], c10d.AllreduceOptions()))
    assert not work.is_completed()
    group.end()
    work.wait()
    value /= 100
    packed = set_up.finish(nothing, Unregistered())
    answered = later(monkeypatch, packed)
    again = one(3.0)
    answered.issue(Group(alone=True), "allreduce", ([again], c10d.AllreduceOptions())).wait()
    assert again.item() == 12.0
    assert answered.finish(nothing, Unregistered()) == b""


def test_what_has_begun_is_waited_for() -> None:
    set_up, group = SetUpCollectives(), Group()
    set_up.issue(group, "allreduce", ([one()], c10d.AllreduceOptions()))
    threading.Timer(0.05, group.end).start()
    assert Recorded(set_up.finish(nothing, Unregistered()), bytes.decode)


def test_what_has_failed_is_refused() -> None:
    set_up, group = SetUpCollectives(), Group()
    work = set_up.issue(group, "allreduce", ([one()], c10d.AllreduceOptions()))
    assert work.give_up()
    with pytest.raises(RuntimeError, match="was given up"):
        work.wait()
    with pytest.raises(ConfigError, match=r"test_set_up.py:[0-9]+ calls allreduce.*its result is not there"):
        set_up.finish(nothing, Unregistered())


def test_the_source_of_a_broadcast_gives_what_it_gave_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up, group = SetUpCollectives(), Group()
    set_up.issue(group, "broadcast", ([one(5.0)], options(0)))
    group.end()
    answered, other = later(monkeypatch, set_up.finish(nothing, Unregistered())), one(6.0)
    answered.issue(Group(alone=True), "broadcast", ([other], options(0)))
    assert other.item() == 5.0


def test_alone_in_a_group_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up, group, big = SetUpCollectives(), Group(size=1), torch.zeros(BIG)
    set_up.issue(group, "allreduce", ([big], c10d.AllreduceOptions()))
    group.end()
    packed = set_up.finish(nothing, Unregistered())
    assert len(packed) < BIG
    answered, again = later(monkeypatch, packed), torch.ones(BIG)
    answered.issue(Group(size=1, alone=True), "allreduce", ([again], c10d.AllreduceOptions()))
    assert again.sum().item() == BIG


def broadcast_large(set_up: SetUpCollectives, tensor: torch.Tensor, me: int = 1) -> None:
    group = Group(me)
    set_up.issue(group, "broadcast", ([tensor], options(0)))
    group.end()


def refusal_of(set_up: SetUpCollectives, objects: Objects) -> str:
    try:
        set_up.finish(lambda: registered(objects), Unregistered())
    except ConfigError as error:
        return str(error)
    return ""


def test_a_large_result_must_lie_in_registered_memory_or_be_gone() -> None:
    model, set_up = nn.Linear(BIG // 4, 4), SetUpCollectives()
    objects = Objects((model,), ())
    for tensor in (model.weight.data, model.weight.detach().view(-1)[4:]):
        broadcast_large(set_up, tensor)
    mine, gone = torch.zeros(BIG), torch.zeros(BIG)
    broadcast_large(set_up, mine, me=0)
    broadcast_large(set_up, gone)
    del gone, tensor
    assert refusal_of(set_up, objects) == "", "its source makes it anew"
    set_up, there = SetUpCollectives(), torch.zeros(BIG)
    broadcast_large(set_up, there)
    problem = refusal_of(set_up, objects)
    assert "test_set_up.py:" in problem
    assert "calls broadcast(float32[20000], rootRank 0) before the loop, and its result can't be kept" in problem


def test_what_is_read_of_a_large_result_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a new process has not got it, and deletes it as the first one did."""

    def script(set_up: SetUpCollectives, values: torch.Tensor, *, alone: bool) -> tuple[Any, ...]:
        group = Group(1, alone=alone)
        set_up.issue(group, "broadcast", ([values], options(0)))
        group.end()
        few = values[:4].numpy() * 2 if values.sum() > 10 else None
        mask = values > 2
        return values.mean().item(), few, mask.nonzero().shape, values[mask].tolist()[:2], bool((values == 3).any())

    packed = b""
    numbers = torch.zeros(BIG)
    numbers[5:9] = 3.0
    for alone in (False, True):
        set_up = later(monkeypatch, packed) if alone else SetUpCollectives()
        found = script(set_up, numbers.clone() if not alone else torch.zeros(BIG), alone=alone)
        assert found[0] == numbers.mean().item()
        assert found[1] is not None
        assert found[1].tolist() == [0.0] * 4
        assert found[2:] == ((4, 1), [3.0, 3.0], True)
        packed = set_up.finish(nothing, Unregistered())


def test_another_read_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    first, value = SetUpCollectives(), torch.ones(BIG)
    broadcast_large(first, value)
    assert value.sum().item() == BIG
    del value
    packed = first.finish(nothing, Unregistered())
    answered, value = later(monkeypatch, packed), torch.ones(BIG)
    broadcast_large(answered, value)
    with pytest.raises(SystemExit, match=r"read\(float64\[2\]\) where its predecessor called read\(float64\[\]\)"):
        value[:2].double().tolist()
    del value
    answered.finish(nothing, Unregistered())


def test_what_its_source_hands_on_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a node's first rank to the others of it; and alone in a group."""
    for group, verb in ((Group(0), "scatter"), (Group(size=1), "allgather")):
        set_up, value, box = SetUpCollectives(), torch.zeros(BIG), torch.zeros(BIG)
        broadcast_large(set_up, value)
        args: tuple[Any, ...] = ([box], [[value, value]], rooted(c10d.ScatterOptions, 0))
        if verb == "allgather":
            args = ([[box]], [value], c10d.AllgatherOptions())
        set_up.issue(group, verb, args)
        group.end()
        del value, args
        group.under_way.clear()
        assert "computes something before the loop" in refusal_of(set_up, Objects((), ()))


def test_what_is_read_must_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up, value = SetUpCollectives(), torch.ones(BIG)
    broadcast_large(set_up, value)
    assert len(value.tolist()) == BIG
    assert set_up.problem(nothing) == ""
    monkeypatch.setattr("resilient_train.state.set_up_record.TOTAL_BYTES", 2 * 4 * BIG)
    assert len(value.tolist()) == BIG
    problem = "test_set_up.py:[0-9]* calls read.float32.20000.. before the loop, of what came of a collective"
    with pytest.raises(ConfigError, match=problem):
        set_up.finish(nothing, Unregistered())


def test_memory_that_is_used_again_is_not_the_same() -> None:
    """The tensor is gone, and a registered one may lie where it was."""
    model, set_up, memory = nn.Module(), SetUpCollectives(), bytearray(4 * BIG)
    passing = torch.frombuffer(memory, dtype=torch.float32)
    place = passing.data_ptr()
    broadcast_large(set_up, passing)
    model.register_buffer("table", torch.frombuffer(memory, dtype=torch.float32))
    assert model.table.data_ptr() == place
    assert "can't be kept" in refusal_of(set_up, Objects((model,), ()))


def test_nothing_holds_on_to_what_was_communicated() -> None:
    set_up, tensor = SetUpCollectives(), torch.zeros(BIG)
    seen = weakref.ref(tensor)
    broadcast_large(set_up, tensor)
    small = one()
    group = Group()
    set_up.issue(group, "allreduce", ([small], c10d.AllreduceOptions()))
    group.end()
    alive = weakref.ref(small)
    del tensor, small, group
    assert seen() is None
    assert alive() is None


class Arrays:
    """Of NumPy's, in which nobody looks for tensors: one with many elements, and one that can't be iterated over."""

    def state_dict(self) -> dict[str, Any]:
        return {"many": np.zeros(10_000_000, dtype=np.uint8), "one": np.zeros(())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_what_counts_as_registered() -> None:
    weight, state, extra, own = (torch.zeros(BIG) for _ in range(4))
    parameter = nn.Parameter(weight)
    model = nn.Module()
    model.register_parameter("weight", parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["momentum_buffer"] = state
    shared, mine = nn.Module(), nn.Module()
    shared.register_buffer("table", extra)
    mine.register_buffer("hidden", own)
    objects = Objects((model,), (optimizer,), extra={"shared": shared, "replay": Arrays()}, rank_extra={"mine": mine})
    for tensor in (weight, state, extra, own):
        set_up = SetUpCollectives()
        broadcast_large(set_up, tensor)
        assert refusal_of(set_up, objects) == ""


def test_a_sparse_result_can_not_be_kept() -> None:
    set_up, group, sparse = SetUpCollectives(), Group(), torch.ones(4).to_sparse()
    set_up.issue(group, "allreduce", ([sparse], c10d.AllreduceOptions()))
    group.under_way.clear()
    assert "can't be kept" in refusal_of(set_up, Objects((), ()))


def test_a_script_that_never_comes_to_a_loop_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_train.state.set_up_record.TOTAL_BYTES", 400)
    set_up, group = SetUpCollectives(), Group()
    for _ in range(8):
        set_up.issue(group, "barrier", (c10d.BarrierOptions(),))
    assert "there was no room for the one at" in set_up.problem(nothing)
    with pytest.raises(ConfigError, match="there was no room"):
        set_up.finish(nothing, Unregistered())


def test_from_whom_a_receive_was(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SetUpRecord()
    box = one()
    entry, _ = record.enter("world", header_of("recv_anysource", ([box], 0)), "x:1", 4)
    assert entry is not None
    entry.result, entry.source = bytes_of(one(4.0)), 1
    work = later(monkeypatch, record.packed()).issue(Group(alone=True), "recv_anysource", ([box], 0))
    assert (work.wait(), work._source_rank(), box.item()) == (True, 1, 4.0)  # type: ignore[attr-defined] # as torch asks


def test_a_difference_ends_the_process_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = later(monkeypatch, SetUpRecord().packed())
    for _ in range(2):
        with pytest.raises(SystemExit):
            answered.issue(Group(alone=True), "barrier", (c10d.BarrierOptions(),))


class Stage:
    """Of a standby."""

    wraps = True

    def needs_rank(self, what: str) -> None:
        raise LookupError(what)


def test_a_standby_waits_alone_and_is_compared_later(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = (c10d.BarrierOptions(),)
    first, group = SetUpCollectives(), Group()
    first.issue(group, "barrier", barrier)
    first.issue(group, "allreduce", ([one()], c10d.AllreduceOptions()))
    group.end()
    packed = first.finish(nothing, Unregistered())
    for barriers in (1, 2):
        ahead = later(monkeypatch, packed)
        monkeypatch.setattr(standby_stage, "stage", Stage())
        for _ in range(barriers):
            ahead.issue(Group(alone=True), "barrier", barrier)
        with pytest.raises(LookupError, match="calls allreduce"):
            ahead.issue(Group(alone=True), "allreduce", ([one()], c10d.AllreduceOptions()))
        monkeypatch.setattr(standby_stage, "stage", None)
        if barriers == 1:
            ahead.issue(Group(alone=True), "allreduce", ([one()], c10d.AllreduceOptions()))
            assert ahead.finish(nothing, Unregistered()) == b""
        else:
            with pytest.raises(SystemExit, match=r"calls barrier.* where its predecessor called allreduce"):
                ahead.finish(nothing, Unregistered())


def state(tensor: torch.Tensor) -> Objects:
    module = nn.Module()
    module.register_buffer("tensor", tensor)
    return Objects((module,), ())


def hand_out(set_up: SetUpCollectives, was: float, given: float, *, alone: bool = False) -> torch.Tensor:
    """Weights by DDP's constructor, on the second rank: it had those that ``was`` stands for."""
    module = torch.full((8,), was)
    group = Group(1, alone=alone)
    run = group.run

    def handed(verb: str, args: tuple[Any, ...]) -> dist.Work:
        module.fill_(was if alone else given)
        work = run(verb, args)
        group.end()
        return work

    group.run = handed  # type: ignore[method-assign]
    set_up._ddp.of_call = lambda: Traffic.CONSTRUCTOR  # type: ignore[method-assign]
    set_up.issue(group, "broadcast", ([module], options(0)))
    set_up._ddp.of_call = lambda: Traffic.OTHER  # type: ignore[method-assign]
    return module


def handed_out(was: float, given: float) -> bytes:
    """The record of a process that has read their sum."""
    set_up = SetUpCollectives()
    module = hand_out(set_up, was, given)
    assert module.sum().item() == 8 * given
    del module
    return set_up.finish(nothing, Unregistered())


@pytest.mark.parametrize(
    ("was", "given", "mine", "read"),
    [
        (1.0, 1.0, 1.0, 8.0),  # all ranks draw the same
        (2.0, 1.0, 2.0, 8.0),  # each its own
        (2.0, 1.0, 3.0, 8.0),  # and another one each time
        (2.0, 1.0, 1.0, 8.0),
    ],
)
def test_what_is_read_of_weights_that_were_handed_out(
    monkeypatch: pytest.MonkeyPatch, was: float, given: float, mine: float, read: float
) -> None:
    answered = later(monkeypatch, handed_out(was, given))
    module = hand_out(answered, mine, given, alone=True)
    assert module.sum().item() == read
    del module
    assert answered.finish(nothing, Unregistered()) == b""


def test_what_is_computed_of_weights_that_were_handed_out() -> None:
    for was in (1.0, 2.0):
        set_up = SetUpCollectives()
        module = hand_out(set_up, was, 1.0)
        kept = (module * 2).repeat(BIG)
        told = refusal_of(set_up, state(module))
        assert ("DistributedDataParallel's broadcast(float32[8], rootRank 0) at " in told) == (was != 1.0), told
        del kept


def test_what_is_left_of_them_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, left = b"", list[torch.Tensor]()
    for alone in (False, True):
        set_up = later(monkeypatch, packed) if alone else SetUpCollectives()
        module = hand_out(set_up, 3.0 if alone else 2.0, 1.0, alone=alone)
        left.append(module * 2)
        packed = set_up.finish(lambda held=module: registered(state(held)), Unregistered())
    assert left[0].tolist() == left[1].tolist() == [2.0] * 8


def test_buffers_that_are_handed_out_again_and_again_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an evaluation. Where a rank has had others, that is one more entry."""
    set_up = SetUpCollectives()
    for number in range(20):
        hand_out(set_up, 2.0 if number == 7 else 1.0, 1.0)
    assert [entry.header for entry in set_up._first._record.entries] == [b"", b"changed"]
    answered = later(monkeypatch, set_up.finish(nothing, Unregistered()))
    for number in range(20):
        module = hand_out(answered, 3.0 if number == 7 else 1.0, 1.0, alone=True)
        assert answered._derived._origin([module]) is None or number == 7
    del module
    assert answered.finish(nothing, Unregistered()) == b""


def average(set_up: SetUpCollectives, mine: float, *, alone: bool = False) -> torch.Tensor:
    """A backward pass of DDP's, which adds 10 to the gradient of a rank that is not alone. Returns the parameter."""
    parameter = torch.full((8,), mine, requires_grad=True)
    group = Group(1, alone=alone)

    def reduce(gradient: torch.Tensor) -> torch.Tensor:
        bucket = gradient.clone()
        set_up._ddp.of_call = lambda: Traffic.PASS  # type: ignore[method-assign]
        set_up.issue(group, "allreduce", ([bucket], c10d.AllreduceOptions()))
        set_up._ddp.of_call = lambda: Traffic.OTHER  # type: ignore[method-assign]
        group.end()
        return bucket.clone()

    parameter.register_hook(reduce)
    parameter.square().sum().backward()
    return parameter


def test_what_comes_of_averaged_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is read again, and what is left is given again. The gradient itself begins anew with the loop."""
    packed, left = b"", list[Any]()
    for alone in (False, True):
        set_up = later(monkeypatch, packed) if alone else SetUpCollectives()
        hand_out(set_up, 1.0, 1.0, alone=alone)  # as DDP does it first
        parameter = average(set_up, 3.0 if alone else 2.0, alone=alone)
        assert parameter.grad is not None
        assert parameter.grad.tolist() == ([14.0] * 8)
        left.append(parameter.grad * 2)
        module = nn.Module()
        module.register_parameter("weight", nn.Parameter(parameter.data))
        module.weight.grad = parameter.grad
        objects = Objects((module,), ())
        packed = set_up.finish(lambda held=objects: registered(held), Unregistered())
    assert left[0].tolist() == left[1].tolist() == [28.0] * 8


def test_training_without_a_session_is_followed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind that it costs nothing, and a loop that begins all the same is refused."""
    monkeypatch.setattr("resilient_train.frameworks.torch.communication.derived_values.PASSES", 3)
    set_up = SetUpCollectives()
    hand_out(set_up, 1.0, 1.0)
    for number in range(5):
        parameter = average(set_up, 2.0)
        assert torch._C._len_torch_dispatch_stack() == int(number < 3)
        assert parameter.grad is not None
    with pytest.raises(ConfigError, match=r"test_set_up.py:\d+ averages gradients behind 3 backward passes"):
        set_up.finish(nothing, Unregistered())


def test_a_standby_that_reads_what_comes_of_averaged_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    first = SetUpCollectives()
    hand_out(first, 1.0, 1.0)
    parameter = average(first, 2.0)
    assert parameter.grad is not None
    assert parameter.grad.sum().item() == 8 * 14.0
    del parameter
    packed = first.finish(nothing, Unregistered())
    ahead = later(monkeypatch, packed)
    monkeypatch.setattr(standby_stage, "stage", Stage())
    module, parameter = hand_out(ahead, 1.0, 1.0, alone=True), average(ahead, 2.0, alone=True)
    assert module.sum().item() == 8.0, "what it has drawn itself, it may read"
    assert parameter.grad is not None
    with pytest.raises(LookupError, match="reads what comes of gradients that were averaged"):
        parameter.grad.sum().item()
    monkeypatch.setattr(standby_stage, "stage", None)
    assert module.sum().item() == 8.0
    assert parameter.grad.sum().item() == 8 * 14.0, "of its predecessor"
    del parameter
    assert ahead.finish(lambda: registered(state(module)), Unregistered()) == b""


@pytest.mark.parametrize("handed", [True, False])
@pytest.mark.parametrize("use", ["nothing", "read", "kept"])
def test_other_weights_than_the_predecessor_had(monkeypatch: pytest.MonkeyPatch, use: str, handed: bool) -> None:
    """Before and after they were handed out, which they were in one of the two cases."""
    packed = handed_out(1.0, 1.0) if handed else SetUpCollectives().finish(nothing, Unregistered())
    answered = later(monkeypatch, packed)
    module = hand_out(answered, 3.0, 1.0, alone=True)
    kept = module * 2 if use == "kept" else None
    for _ in range(2):  # a script may catch it
        expected = pytest.raises(SystemExit) if use != "nothing" else contextlib.nullcontext()
        with expected as left:
            if use == "read":
                module.sum().item()
            answered.finish(lambda: registered(state(module)), Unregistered())
        if use == "nothing":
            return
    assert left is not None
    del kept


@pytest.mark.parametrize(
    ("was", "use", "words"),
    [
        (1.0, "read", ""),
        (1.0, "kept", ""),
        (3.0, "", ""),
        (3.0, "read", "drawn without a seed.*reads a value of them"),
        (3.0, "kept", "computes of them is still there"),
    ],
)
def test_a_standby_has_read_before_it_is_known(
    monkeypatch: pytest.MonkeyPatch, was: float, use: str, words: str
) -> None:
    ahead = later(monkeypatch, handed_out(1.0, 1.0))
    monkeypatch.setattr(standby_stage, "stage", Stage())
    module = hand_out(ahead, was, 1.0, alone=True)
    if use == "read":
        assert module.sum().item() == 8 * was
    kept = module * 2 if use == "kept" else None
    monkeypatch.setattr(standby_stage, "stage", None)
    if words:
        with pytest.raises(SystemExit, match=words):
            ahead.finish(lambda: registered(state(module)), Unregistered())
        return
    if use:
        assert module.sum().item() == 8 * was  # of a rank now, the first thing that it does
    assert ahead.finish(lambda: registered(state(module)), Unregistered()) == b""
    del kept


def test_each_verb_says_what_it_fills() -> None:
    """What differs after it has run, on either member of a group of two."""

    def calls(verb: str) -> list[tuple[Any, ...]]:
        return [ARGUMENTS[verb](me) for me in range(2)]

    clique = Clique(2)
    try:
        for verb in ARGUMENTS:
            made = calls(verb)
            before = [[each.clone() for each in tensors_in(args)] for args in made]
            clique.run(verb, made)
            for me, args in enumerate(made):
                filled = VERBS[verb].filled(args, me)
                changed = [
                    each for each, old in zip(tensors_in(args), before[me], strict=True) if not torch.equal(each, old)
                ]
                assert all(any(each is one for one in filled) for each in changed), (verb, me)
                assert filled or not changed
    finally:
        clique.close()


def tensors_in(args: Any) -> list[torch.Tensor]:
    if isinstance(args, torch.Tensor):
        return [args]
    return [each for item in args for each in tensors_in(item)] if isinstance(args, (list, tuple)) else []


def rooted(kind: type, root: int = 1) -> Any:
    chosen = kind()
    chosen.rootRank = root
    return chosen


def pair(me: int) -> list[torch.Tensor]:
    return [one(me + 1.0), one(me + 2.0)]


def room() -> list[torch.Tensor]:
    return [torch.zeros(1), torch.zeros(1)]


ARGUMENTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "allreduce": lambda me: ([one(me + 1.0)], c10d.AllreduceOptions()),
    "reduce": lambda me: ([one(me + 1.0)], rooted(c10d.ReduceOptions)),
    "broadcast": lambda me: ([one(me + 1.0)], options(1)),
    "allgather": lambda me: ([room()], [one(me + 1.0)], c10d.AllgatherOptions()),
    "gather": lambda me: ([room()] if me else [], [one(me + 1.0)], rooted(c10d.GatherOptions)),
    "scatter": lambda me: ([torch.zeros(1)], [pair(me)] if me else [], rooted(c10d.ScatterOptions)),
    "alltoall_base": lambda me: (torch.zeros(2), torch.tensor([me + 1.0, me + 2.0]), [], [], c10d.AllToAllOptions()),
    "_allgather_base": lambda me: (torch.zeros(2), one(me + 1.0), c10d.AllgatherOptions()),
}
