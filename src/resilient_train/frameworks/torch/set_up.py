"""Collectives that the script calls before its loop: agreeing on a configuration, counting tokens, waiting.

The first process of a rank makes them with the others, and records what they gave it. A process that takes the rank's
place makes them alone, the others being in the middle of their training, and is given what was recorded. A result that
is too large to be kept must have gone into registered tensors, whose content comes from a replica: ``problem`` says so
in the first process, while nothing is lost. What DDP does by itself is no part of it (``ddp_traffic.py``).

A standby, which is no rank yet, can do no collective that gives something. Where the ranks wait for each other it goes
on; what it has called is compared when it has become a rank.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilient_train import config, standby_stage
from resilient_train.errors import ConfigError
from resilient_train.frameworks import set_up_recall
from resilient_train.frameworks.torch.call_codec import bytes_of, fill_all, header_of, size_of, told
from resilient_train.frameworks.torch.collective_results import (
    POINT_TO_POINT,
    VERBS,
    DoneMessage,
    Tensors,
    completed,
    root_of,
)
from resilient_train.frameworks.torch.ddp_traffic import DdpTraffic
from resilient_train.frameworks.torch.guarded_works import GuardedWork, KeptWork
from resilient_train.frameworks.torch.own_objects import of_objects
from resilient_train.frameworks.torch.storages import Memory, are_gone, holds, memory_of
from resilient_train.frameworks.torch.unregistered import Unregistered
from resilient_train.frameworks.torch.weight_loading import Filled, filled, spoil
from resilient_train.script_place import line
from resilient_train.state.set_up_record import (
    RESULT_BYTES,
    TOTAL_BYTES,
    DifferenceError,
    Recorded,
    SetUpEntry,
    SetUpRecord,
)

_WAITING = "barrier"
_FROM_ROOT = ("broadcast", "scatter")
_FROM_ANYBODY = "recv_anysource"
_OBJECTS = (dist.distributed_c10d.__file__, "broadcast_object_list")
_INIT = torch.nn.init.__file__
_KIB, _MIB = 1 << 10, 1 << 20
Registered = Callable[[], Memory]
"""The memory of all registered tensors."""


class Group(Protocol):
    """A process group, as far as it matters here."""

    @property
    def group_name(self) -> str:
        """The same on all its members, and in each run of the script."""
        ...

    def rank(self) -> int:
        """This process's."""
        ...

    def size(self) -> int:
        """How many members there are."""
        ...

    def run(self, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """Runs the verb over the group, or alone where this process has not joined it."""
        ...


class _Call(NamedTuple):
    """A collective as it was called, and where."""

    group: Group
    verb: str
    args: tuple[Any, ...]
    header: bytes
    place: str

    def run(self) -> dist.Work:
        return self.group.run(self.verb, self.args)

    @property
    def outputs(self) -> Tensors:
        """What it fills."""
        if self.verb in POINT_TO_POINT:
            return list(self.args[0]) if self.verb != "send" else []
        return VERBS[self.verb].filled(self.args, 0)

    @property
    def is_source(self) -> bool:
        """Of a broadcast or scatter, so that it comes to the same again."""
        named = any(hasattr(each, "rootRank") for each in self.args)
        return self.verb in _FROM_ROOT and named and root_of(self.args) == self.group.rank()


class _Large(NamedTuple):
    """A call whose result is not kept, the memory that it went to, and what it was to fill."""

    call: _Call
    memory: Memory | None
    filled: Filled | None

    def problem(self, held: Memory, divided: Callable[[], Sequence[str]]) -> str:
        """Why a process that takes the rank's place can't go without; empty if it can. ``held``: what it is given;
        ``divided``: parameters that are divided among ranks, and not registered.
        """
        if holds(held, self.memory):
            return ""
        called = f"{self.call.place} calls {told(self.call.header)}"
        if self.filled is None:
            return (
                f"{called} before the loop, and its result can't be kept (only up to "
                f"{RESULT_BYTES // _KIB} KiB each, {TOTAL_BYTES // _MIB} MiB in all), nor does it lie in "
                "registered tensors: a process that replaces this rank would go without. Register it, make it on "
                "each rank alone, or read it from a file"
            )
        if self.filled.thing is None:
            if self.memory is None or not are_gone(self.memory - held):
                return (
                    f"{called} before the loop, and what came of it is still there, and not registered: a process that "
                    "replaces this rank would go without. Register it, delete it when a model is loaded from it, or "
                    "give it what this rank has read: distribute_tensor(..., src_data_rank=None)"
                )
            if not divided():
                return ""
            return (
                f"{called} before the loop, and what it hands out may have gone into parameter "
                f"{divided()[0]}, which is not registered: a process that replaces this rank would go "
                "without. Register it too, Session(model=[...]), or give it what this rank has read: "
                "distribute_tensor(..., src_data_rank=None)"
            )
        if self.filled.is_in(held):
            return ""
        what = f"a {self.filled.kind} that is not registered" if self.filled.kind else "what is gone by now"
        return (
            f"{called} before the loop, to fill {what}: a process that replaces this rank would go without. Register "
            "it too, Session(model=[...]), or load it on each rank alone (dcp.load)"
        )


class SetUpCollectives:
    """The collectives of this process before its loop."""

    def __init__(self) -> None:
        self._frozen = gc.get_freeze_count()
        """So many objects the collector did not list then."""
        self._ddp = DdpTraffic()
        self._first = _First()
        self._later: _Later | None = None
        self._ahead: list[tuple[str, bytes, str]] = []
        """What a standby has called: group, header, place."""

    def issue(self, group: Group, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """Carries a collective out, or answers it."""
        if self._first.full or self._ddp.is_this():
            return group.run(verb, args)
        call = _Call(group, verb, args, header_of(verb, args), line())
        if standby_stage.stage is not None:
            if verb != _WAITING:
                standby_stage.stage.needs_rank(f"calls {verb}")
            self._ahead.append((group.group_name, call.header, call.place))
            return call.run()
        later = self._as_later()
        return later.answer(call) if later is not None else self._first.record(call)

    def takes_objects(self, group: Group) -> bool:
        """Whether torch asks for the rank where it decides that it need not tell this one what objects it has sent.

        A process that takes the source's place may have made others, so it is told as the others were.
        """
        asking = sys._getframe(2).f_code
        where = (asking.co_filename, asking.co_name)
        return where == _OBJECTS and group.size() > 1 and standby_stage.stage is None and self._as_later() is not None

    def _as_later(self) -> _Later | None:
        """None in the first process of a rank."""
        link = config.read_link()
        if self._later is None and link is not None and link.joining:
            self._later = _Later(link, self._ahead)
        return self._later

    def problem(self, registered: Registered) -> str:
        """Why a process that took this rank's place would not be what this one is; empty if it would."""
        problem = self._first.problem(registered, self._frozen)
        if problem or self._as_later() is not None:
            return problem
        place = self._ddp.unregistered(registered)
        return place and (
            f"{place} wraps a model by DistributedDataParallel that is not registered whole: a process that replaces "
            "this rank would have another copy of it. Register it too: Session(model=[...])"
        )

    def left_out(self, wrappers: Sequence[DistributedDataParallel], models: Sequence[torch.nn.Module]) -> str:
        """Why the gradients of a registered model could not be averaged after a recovery; empty if they could."""
        place = self._ddp.left_out(wrappers, models)
        return place and (
            f"{place} wraps a registered model by DistributedDataParallel, and the wrapper itself is not registered: "
            "after a fault it would lay out its gradients in another order than a new process; register the wrapper, "
            "Session(model=ddp)"
        )

    def finish(self, registered: Registered, unregistered: Unregistered) -> bytes:
        """The loop begins. Returns the record, in the first process of a rank. Raises ConfigError."""
        later = self._as_later()
        unregistered.begin(registered, self._frozen)
        if later is not None:
            later.finish(unregistered)
            return b""
        self._first.wait()
        problem = self._first.unfinished() or self.problem(registered)
        if problem:
            raise ConfigError(problem)
        return self._first.packed(unregistered.packed())


class _First:
    """The first process of a rank: it records."""

    def __init__(self) -> None:
        self._record = SetUpRecord()
        self._live: dict[int, GuardedWork] = {}
        self._open: dict[int, _Call] = {}
        """Calls whose result is not there yet, by the id of their entries."""
        self._large: list[_Large] = []

    @property
    def full(self) -> bool:
        """Nothing more is recorded."""
        return bool(self._record.full_at)

    def packed(self, unregistered: bytes) -> bytes:
        return self._record.packed(unregistered)

    def record(self, call: _Call) -> dist.Work:
        """Makes the collective; its result is taken before the caller hears of its end."""
        # Alone in the group, a process comes to the same again.
        outputs = call.outputs if call.group.size() > 1 else []
        says = _mask_told if _is_mask(outputs) else _content
        size = 1 if says is _mask_told else size_of(outputs)
        goes_to = filled() if outputs else None
        most = 0 if goes_to is not None and goes_to.thing else TOTAL_BYTES if of_objects() else RESULT_BYTES
        entry, room = self._record.enter(call.group.group_name, call.header, call.place, size, most_bytes=most)
        if entry is None:
            self._large.clear()
            return call.run()
        memory = memory_of(outputs)
        if not room or memory is None:
            if not call.is_source:
                self._large.append(_Large(call._replace(args=()), memory, goes_to))
            return call.run()
        if not outputs:
            return call.run()
        self._open[id(entry)] = call._replace(args=())
        return self._kept(call, outputs, entry, says)

    def _kept(self, call: _Call, outputs: Tensors, entry: SetUpEntry, says: Callable[[Tensors], bytes]) -> dist.Work:
        def take() -> None:
            entry.result = says(outputs)
            self._open.pop(id(entry), None)

        work = call.run()
        if call.verb in POINT_TO_POINT:
            return _Receive(work, take, entry, anybody=call.verb == _FROM_ANYBODY)
        try:
            return KeptWork(work, self._live, take)
        except RuntimeError:  # gloo has no future for a reduce-scatter
            work.wait()
            take()
            return completed(call.args)

    def wait(self) -> None:
        """Waits until what was begun has ended. Raises what it failed with."""
        for work in list(self._live.values()):
            work.wait()

    def problem(self, registered: Registered, frozen: int) -> str:
        """See SetUp."""
        if self.full:
            return (
                f"the collectives before the Session take more than the {TOTAL_BYTES // _MIB} MiB that are kept for a "
                f"process that replaces this rank; there was no room for the one at {self._record.full_at}"
            )
        large, self._large = self._large, []
        held = registered() if large else frozenset()

        @functools.cache
        def divided() -> Sequence[str]:
            unregistered = Unregistered()
            unregistered.begin(lambda: held, frozen)
            return unregistered.sharded

        for each in large:
            if problem := each.problem(held, divided):
                return problem
        return ""

    def unfinished(self) -> str:
        """A receive that nobody has waited for, or a collective that has failed; empty if there is none."""
        for call in self._open.values():
            return (
                f"{call.place} calls {told(call.header)} before the loop, and its result is not there when the loop "
                "begins (it has failed, or nobody has called wait())"
            )
        return ""


class _Later:
    """A process that takes the rank's place: it is given what the first one was."""

    def __init__(self, link: config.AgentLink, ahead: list[tuple[str, bytes, str]]) -> None:
        self._link = link
        self._strayed = False
        first = set_up_recall.recall(link)
        self._recorded, self._changed = Recorded(first.record, told), first.changed
        for group, header, place in ahead:
            self._next(group, header, place)

    def _next(self, group: str, header: bytes, place: str) -> SetUpEntry:
        try:
            return self._recorded.next(group, header, place)
        except DifferenceError as difference:
            raise self._stray(str(difference)) from None

    def _stray(self, difference: str) -> SystemExit:
        if self._strayed:  # the script has caught the first one
            return SystemExit(2)
        self._strayed = True
        return set_up_recall.stray(
            self._link,
            f"since its script does not do again what it did at first: {difference}. Collectives before the loop must "
            "be the same each time the script runs (docs/reference/session.md)",
        )

    def answer(self, call: _Call) -> dist.Work:
        """Gives what the first process was given. SystemExit: it did not make this call."""
        entry = self._next(call.group.group_name, call.header, call.place)
        outputs = call.outputs
        if entry.result is None:
            work = call.run()
            if call.group.size() > 1 and not call.is_source and filled() is not None:
                spoil(outputs)
            return work
        if _is_mask(outputs):
            _fill_mask(outputs, entry.result)
        else:
            fill_all(outputs, entry.result)
        return DoneMessage(entry.source) if call.verb == _FROM_ANYBODY else completed(call.args)

    def finish(self, unregistered: Unregistered) -> None:
        """The loop begins."""
        try:
            self._recorded.finish()
        except DifferenceError as difference:
            raise self._stray(str(difference)) from None
        if changed := self._changed:
            how = set_up_recall.HOW_TO_KEEP
            raise set_up_recall.stray(self._link, f"since {changed}, and a new process has it as it was: {how}")
        if unregistered.difference(self._recorded.others):
            gc.collect()  # a copy that nobody has any more, in a cycle
        if different := unregistered.difference(self._recorded.others):
            raise set_up_recall.stray(
                self._link,
                f"since {different} than in the process whose place it takes: register it too, Session(model=[...]), "
                "or make it the same each time the script runs (docs/reference/session.md)",
            )


def _content(outputs: Tensors) -> bytes:
    return b"".join(map(bytes_of, outputs))


def _is_mask(outputs: Tensors) -> bool:
    """Whether ``torch.nn.init`` asks if anything of a DTensor is out of bounds, and draws again until nothing is. From
    torch 2.15 on it gathers a mask as large as the tensor for that, and looks only whether any of it is set.
    """
    if size_of(outputs) <= RESULT_BYTES or any(tensor.dtype is not torch.bool for tensor in outputs):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _INIT:
        frame = frame.f_back
    return frame is not None


def _mask_told(outputs: Tensors) -> bytes:
    """In one byte: nothing is set, some of it, or all."""
    return bytes([any(bool(each.any()) for each in outputs) + all(bool(each.all()) for each in outputs)])


def _fill_mask(outputs: Tensors, told: bytes) -> None:
    """A mask of which the same can be said."""
    for each in outputs:
        each.fill_(told != b"\0")
    if told == b"\1":
        outputs[0].view(-1)[0] = False


class _Receive(dist.Work):
    """A receive, which may be waited for once only; its result is taken then."""

    def __init__(self, inner: dist.Work, take: Callable[[], None], entry: SetUpEntry, *, anybody: bool) -> None:
        super().__init__()
        self._inner, self._take, self._entry, self._anybody = inner, take, entry, anybody
        self._over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._over:
            self._inner.wait(*([] if timeout is None else [timeout]))
            self._over = True
            if self._anybody:
                self._entry.source = self._source_rank()
            self._take()
        return True

    def is_completed(self) -> bool:
        return self._over or bool(self._inner.is_completed())

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())
