"""Collectives that the script calls before its loop: agreeing on a configuration, counting tokens, waiting.

The first process of a rank makes them with the others, and records what they gave it. A process that takes the rank's
place makes them alone, the others being in the middle of their training, and is given what was recorded. A result that
is too large to be kept must have gone into registered tensors, whose content comes from a replica: ``problem`` says so
in the first process, while nothing is lost. What DDP does by itself is no part of it (``ddp_traffic.py``), but a new
process, for which nobody answers, has its own weights behind DDP's constructor, and its own gradients behind a pass,
where the first one was handed its group's first rank's, and the mean of all. If these are others, what is computed of
them is followed like that of a large result.

A standby, which is no rank yet, can do no collective that gives something. Where the ranks wait for each other it goes
on; what it has called is compared when it has become a rank.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilient_train import config, standby_stage
from resilient_train.errors import ConfigError
from resilient_train.frameworks import set_up_recall
from resilient_train.frameworks.torch.checks.unregistered import Unregistered
from resilient_train.frameworks.torch.communication import derived_values
from resilient_train.frameworks.torch.communication.call_codec import bytes_of, fill_all, header_of, size_of, told
from resilient_train.frameworks.torch.communication.collective_results import (
    POINT_TO_POINT,
    VERBS,
    DoneMessage,
    Tensors,
    completed,
    root_of,
)
from resilient_train.frameworks.torch.communication.ddp_traffic import DdpTraffic, Traffic
from resilient_train.frameworks.torch.communication.derived_values import DerivedValues
from resilient_train.frameworks.torch.communication.guarded_works import GuardedWork, KeptWork
from resilient_train.frameworks.torch.communication.own_objects import of_objects
from resilient_train.frameworks.torch.tensors.fingerprint import tensor_digest
from resilient_train.frameworks.torch.tensors.storages import Memory, memory_of
from resilient_train.frameworks.torch.watching.operations import in_backward
from resilient_train.script_place import line
from resilient_train.state.set_up_record import (
    LARGE_RESULTS,
    TOTAL_BYTES,
    DifferenceError,
    Recorded,
    SetUpEntry,
    SetUpRecord,
)

_WAITING, _HANDS_OUT = "barrier", "broadcast"
_FROM_ROOT = ("broadcast", "scatter")
_FROM_ANYBODY = "recv_anysource"
_OBJECTS = (dist.distributed_c10d.__file__, "broadcast_object_list")
_READ = "read"
_MIB = 1 << 20
Registered = Callable[[], Memory]
"""The memory of all registered tensors, or of their gradients."""


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

    def follow(self, derived: DerivedValues) -> None:
        """Its result is not kept."""
        if self.group.size() == 1 or self.is_source:
            derived.are_own(self.outputs, self.args)
        else:
            derived.are_results(self.outputs, told(self.header), self.place)

    @property
    def outputs(self) -> Tensors:
        """What it fills."""
        return _filled(self.verb, self.args)

    @property
    def is_source(self) -> bool:
        """Of a broadcast or scatter, so that it comes to the same again."""
        named = any(hasattr(each, "rootRank") for each in self.args)
        return self.verb in _FROM_ROOT and named and root_of(self.args) == self.group.rank()


class _Weights(NamedTuple):
    """What DDP's constructor has handed out in a group: parameters and buffers of a module. ``place`` makes it."""

    group: str
    place: str
    digest: bytes


class _Ahead(NamedTuple):
    """What a standby has done that is compared when it is a rank."""

    calls: list[tuple[str, bytes, str]]
    """Group, header, place."""
    weights: list[_Weights]
    reads: list[str]
    """The places that read values of what comes of those."""


class SetUpCollectives:
    """The collectives of this process before its loop."""

    def __init__(self) -> None:
        self._ddp = DdpTraffic()
        self._derived = DerivedValues(self._read)
        self._derived.look_from_next_pass()
        self._first = _First(self._derived)
        self._later: _Later | None = None
        self._ahead = _Ahead([], [], [])
        self._handed: set[_Weights] = set()
        """Each once: an evaluation hands the same buffers out with each of its batches."""
        self._averages = False
        """Gradients were averaged by DDP, so that weights and buffers are followed from now on."""

    def issue(self, group: Group, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """Carries a collective out, or answers it."""
        if self._first.full:
            return group.run(verb, args)
        if group.size() > 1:
            self._look_at_bucket()
        of_ddp = self._ddp.of_call()
        if of_ddp is not Traffic.OTHER:
            return self._issue_of_ddp(group, verb, args)
        call = _Call(group, verb, args, header_of(verb, args), line())
        if standby_stage.stage is not None:
            if verb != _WAITING:
                standby_stage.stage.needs_rank(f"calls {verb}")
            self._ahead.calls.append((group.group_name, call.header, call.place))
            return call.run()
        later = self._as_later()
        return later.answer(call) if later is not None else self._first.record(call)

    def _issue_of_ddp(self, group: Group, verb: str, args: tuple[Any, ...]) -> dist.Work:
        tensors = _filled(verb, args)
        if group.size() > 1:
            if verb == _HANDS_OUT and not in_backward() and not self._averages:
                return self._hand_out(group, args)
            if in_backward() and self._derived.passes > derived_values.PASSES:
                self._first.end_at_pass(line())
                self._derived.end()
                return group.run(verb, args)
            # What its constructor gathers are shapes, which it compares, and of which nothing comes.
            if in_backward() or (self._averages and verb == _HANDS_OUT):
                self._averages = True
                self._derived.are_results(tensors, _of_ddp(verb, args), line())
        self._derived.are_room(tensors)
        return group.run(verb, args)

    def _look_at_bucket(self) -> None:
        """A communication hook may fill it with something that it makes of the result, in another thread."""
        bucket = self._ddp.bucket() if in_backward() else None
        if bucket is not None:
            self._derived.are_results([bucket], "a communication hook of DistributedDataParallel", line())
            self._derived.are_room([bucket])

    def _hand_out(self, group: Group, args: tuple[Any, ...]) -> dist.Work:
        """A part of a module, in DDP's constructor; or buffers, in a forward pass."""
        tensors = _filled(_HANDS_OUT, args)
        before = _digest(tensors)
        group.run(_HANDS_OUT, args).wait()
        weights = _Weights(group.group_name, line(), _digest(tensors))
        if weights in self._handed and before == weights.digest:
            return completed(args)
        self._handed.add(weights)
        may = False
        if standby_stage.stage is not None:
            self._ahead.weights.append(weights)
            follows = may = True  # nobody knows yet what the rank was handed
        elif (later := self._as_later()) is not None:
            follows = later.has_others(weights)
        else:
            follows = self._first.handed(weights, changed=before != weights.digest)
        if follows:
            self._derived.are_results(tensors, _of_ddp(_HANDS_OUT, args), weights.place, may=may)
        return completed(args)

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
            self._later = _Later(link, self._derived, self._ahead)
        return self._later

    def _read(self, value: torch.Tensor, may: bool) -> torch.Tensor:
        if standby_stage.stage is not None:
            if not may:
                standby_stage.stage.needs_rank("reads what comes of gradients that were averaged")
            self._ahead.reads.append(line())
            return value
        later = self._as_later()
        return later.read(value, may) if later is not None else self._first.read(value)

    def problem(self, registered: Registered) -> str:
        """Why a process that took this rank's place would not be what this one is; empty if it would."""
        problem = self._first.problem()
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

    def finish(self, registered: Registered, unregistered: Unregistered, gradients: Registered = frozenset) -> bytes:
        """The loop begins. Returns the record, in the first process of a rank. Raises ConfigError."""
        later = self._as_later()
        self._derived.end()
        if later is not None:
            later.finish(registered, gradients)
            unregistered.begin(registered)
            later.compare(unregistered)
            return b""
        unregistered.begin(registered)
        self._first.wait()
        problem = self._first.unfinished() or self.problem(registered)
        problem = problem or self._derived.problem(registered, self._first.keep, gradients)
        if problem:
            raise ConfigError(problem)
        return self._first.packed(unregistered.packed())


class _First:
    """The first process of a rank: it records."""

    def __init__(self, derived: DerivedValues) -> None:
        self._record = SetUpRecord()
        self._derived = derived
        self._live: dict[int, GuardedWork] = {}
        self._open: dict[int, _Call] = {}
        """Calls whose result is not there yet, by the id of their entries."""
        self._large_read = ""
        """What the script has read, and is too large to be kept."""
        self._at_pass = False

    @property
    def full(self) -> bool:
        """Nothing more is recorded."""
        return bool(self._record.full_at)

    def packed(self, unregistered: bytes) -> bytes:
        return self._record.packed(unregistered)

    def end_at_pass(self, place: str) -> None:
        """Nothing is recorded any more: there was one pass of DDP's too many."""
        self._record.end(place)
        self._at_pass = True

    def record(self, call: _Call) -> dist.Work:
        """Makes the collective; its result is taken before the caller hears of its end."""
        outputs = call.outputs if call.group.size() > 1 else []  # alone, a process comes to the same again
        entry, room = self._record.enter(
            call.group.group_name, call.header, call.place, size_of(outputs), whole=of_objects()
        )
        if entry is None:
            self._derived.end()
            return call.run()
        if not outputs or not room or memory_of(outputs) is None:
            call.follow(self._derived)
            return call.run()
        self._derived.are_given(outputs)
        self._open[id(entry)] = call._replace(args=())
        return self._kept(call, outputs, entry)

    def handed(self, weights: _Weights, *, changed: bool) -> bool:
        """It was handed these, and had others if they have ``changed``. Returns whether they are followed."""
        if not self._record.enter_weights(weights.group, weights.place, weights.digest, changed=changed):
            self._derived.end()
            return False
        return changed

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """The script reads it, of what came of a result that is not kept."""
        place, header = line(), header_of(_READ, [value])
        entry, room = self._record.enter(LARGE_RESULTS, header, place, size_of([value]), whole=True)
        if room and entry is not None:
            entry.result = bytes_of(value)
        elif entry is not None:
            self._large_read = self._large_read or (
                f"{place} calls {told(header)} before the loop, of what came of a collective whose result is not kept, "
                f"and it can't be kept either (only up to {TOTAL_BYTES // _MIB} MiB in all): a process that replaces "
                "this rank would read something else. Do it in a body"
            )
        return value

    def keep(self, place: str, data: bytes) -> bool:
        """What the line ``place`` has made of something that is not kept, and is there as the loop begins."""
        return self._record.enter_left(place, data)

    def _kept(self, call: _Call, outputs: Tensors, entry: SetUpEntry) -> dist.Work:
        def take() -> None:
            entry.result = b"".join(map(bytes_of, outputs))
            self._open.pop(id(entry), None)

        work = call.run()
        if call.verb in POINT_TO_POINT:
            return _Receive(work, take, entry, anybody=call.verb == _FROM_ANYBODY)
        with contextlib.suppress(RuntimeError):  # gloo has no future for a reduce-scatter
            if all(each.is_cpu for each in outputs):  # a work of a device is over when the device has it to do
                return KeptWork(work, self._live, take)
        work.wait()
        take()
        return completed(call.args)

    def wait(self) -> None:
        """Waits until what was begun has ended. Raises what it failed with."""
        for work in list(self._live.values()):
            work.wait()

    def problem(self) -> str:
        """Of what could not be recorded."""
        if self._at_pass:
            return (
                f"{self._record.full_at} averages gradients behind {derived_values.PASSES} backward passes in front of "
                "the loop, and what comes of them is followed no further: a process that replaces this rank would have "
                "something else. Train in the loop"
            )
        if self.full:
            return (
                f"the collectives before the Session take more than the {TOTAL_BYTES // _MIB} MiB that are kept for a "
                f"process that replaces this rank; there was no room for the one at {self._record.full_at}"
            )
        return self._large_read

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

    def __init__(self, link: config.AgentLink, derived: DerivedValues, ahead: _Ahead) -> None:
        self._link = link
        self._derived = derived
        self._strayed = False
        self._drawn_otherwise = ""
        """Where weights are made that its predecessor had otherwise before and after they were handed out, so that it
        has not followed what comes of them.
        """
        first = set_up_recall.recall(link)
        self._recorded, self._changed = Recorded(first.record, told), first.changed
        for group, header, place in ahead.calls:
            self._next(group, header, place)
        others = [each for each in ahead.weights if self.has_others(each)]
        self._has_others = bool(others)
        """Where a standby did not know that yet."""
        if not others:
            derived.are_as_at_first()
        elif ahead.reads:
            self._drawn_otherwise = others[0].place
            raise self._uses_weights(f"{ahead.reads[0]} reads a value of them before {standby_stage.NAME}")

    def _next(self, group: str, header: bytes, place: str) -> SetUpEntry:
        try:
            return self._recorded.next(group, header, place)
        except DifferenceError as difference:
            if group == LARGE_RESULTS and self._drawn_otherwise:
                raise self._uses_weights(f"{place} reads a value of them") from None
            raise self._differs(difference) from None

    def _differs(self, difference: DifferenceError) -> SystemExit:
        return self._stray(
            f"its script does not do again what it did at first: {difference}. Collectives before the loop must be the "
            "same each time the script runs (docs/reference/session.md)"
        )

    def _uses_weights(self, how: str) -> SystemExit:
        return self._stray(
            f"it has other weights at {self._drawn_otherwise} than its predecessor had there (drawn without a seed?), "
            f"and its script uses them before the loop: {how}. Draw them by a seed, or do that in a body"
        )

    def _stray(self, reason: str) -> SystemExit:
        if self._strayed:  # the script has caught the first one
            return SystemExit(2)
        self._strayed = True
        return set_up_recall.stray(self._link, f"since {reason}")

    def has_others(self, weights: _Weights) -> bool:
        """Whether they are not those that the first process was handed, or were not what it had before. What comes of
        them is followed then, as far as that one has.
        """
        digest, changed = self._recorded.next_weights(weights.group)
        if digest != weights.digest and not changed:
            self._drawn_otherwise = self._drawn_otherwise or weights.place
        return changed or digest != weights.digest

    def answer(self, call: _Call) -> dist.Work:
        """Gives what the first process was given. SystemExit: it did not make this call."""
        entry = self._next(call.group.group_name, call.header, call.place)
        outputs = call.outputs
        if entry.result is None:
            work = call.run()
            if call.group.size() > 1 and not call.is_source:
                self._derived.are_missing(outputs)
            call.follow(self._derived)
            return work
        self._derived.are_given(outputs)
        fill_all(outputs, entry.result)
        return DoneMessage(entry.source) if call.verb == _FROM_ANYBODY else completed(call.args)

    def read(self, value: torch.Tensor, may: bool) -> torch.Tensor:
        """What the first process read instead."""
        if may and not self._has_others:
            return value  # a standby is a rank since a moment ago, and has the weights that its predecessor had
        entry = self._next(LARGE_RESULTS, header_of(_READ, [value]), line())
        made = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        fill_all([made], entry.result or b"")
        return made

    def finish(self, registered: Registered, gradients: Registered) -> None:
        """The loop begins. What is left of what the first process had otherwise is what it had."""
        place = self._derived.give(registered, self._recorded.next_left, gradients)
        if place and self._drawn_otherwise:
            raise self._uses_weights(f"what {place} computes of them is still there, and not registered")
        try:
            self._recorded.finish()
        except DifferenceError as difference:
            raise self._differs(difference) from None
        if place:
            raise self._stray(
                f"its script does not do again what it did at first: what {place} computes before the loop, of what a "
                "new process is not given, is still there, and was not then (docs/reference/session.md)"
            )

    def compare(self, unregistered: Unregistered) -> None:
        """What the script has made otherwise, and what has changed in its predecessor since."""
        if changed := self._changed:
            raise self._stray(f"{changed}, and a new process has it as it was: {set_up_recall.HOW_TO_KEEP}")
        if unregistered.difference(self._recorded.others):
            gc.collect()  # a copy that nobody has any more, in a cycle
        if different := unregistered.difference(self._recorded.others):
            raise self._stray(
                f"{different} than in the process whose place it takes: register it too, Session(model=[...]), or "
                "make it the same each time the script runs (docs/reference/session.md)"
            )


def _filled(verb: str, args: tuple[Any, ...]) -> Tensors:
    """What the call fills."""
    if verb in POINT_TO_POINT:
        return list(args[0]) if verb != "send" else []
    return VERBS[verb].filled(args, 0)


def _of_ddp(verb: str, args: tuple[Any, ...]) -> str:
    return f"DistributedDataParallel's {told(header_of(verb, args))}"


def _digest(tensors: Tensors) -> bytes:
    return "".join(map(tensor_digest, tensors)).encode()


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
