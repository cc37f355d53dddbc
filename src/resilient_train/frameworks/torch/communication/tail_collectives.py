"""Collectives that the loop calls after the update (logging, early stopping): the tail of a step.

They can't be redone with the step, because the update is applied. So what each rank gives to one is published before it
runs. After a fault nobody runs them over a group again: whoever still runs the tail (a *finisher*) works out each
collective from what its members have published. A rank that died has published what it had come to; a finisher
publishes when it comes there. Movement verbs are copied together by each; a reduction is added up by the lowest
finisher among the members, as the library would have, and its result is published for the others.

What a dead rank had not come to never existed. A reduction and a gather go on without: with the element that changes
nothing, and zeros (event ``tail_input_missing``). Where that would make no sense (it was the source of a broadcast, it
was to give an object or to send a message) the tail can't be finished, and the job ends with its state saved.

All members of a group call the same collectives of it in the same order, as SPMD programs do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch
import torch.distributed as dist

from resilient_train.errors import UsageError
from resilient_train.frameworks.roles import Conductor, LoggedCall, Tails
from resilient_train.frameworks.torch.communication.call_codec import (
    bytes_of,
    call_of,
    check_repeatable,
    fill_all,
    header_of,
    told,
)
from resilient_train.frameworks.torch.communication.call_words import word_of
from resilient_train.frameworks.torch.communication.clique import Clique
from resilient_train.frameworks.torch.communication.collective_results import VERBS, Args, Tensors, done
from resilient_train.frameworks.torch.communication.ddp_traffic import coalesced, synced
from resilient_train.frameworks.torch.communication.process_group import ResilientGroup
from resilient_train.frameworks.torch.watching.caller import carries_objects
from resilient_train.observe.sinks import say_aside
from resilient_train.protocol.rank_effects import Mode
from resilient_train.script_place import line

_POLL_S = 0.0002
_SOURCE_NEEDED = frozenset({"broadcast", "scatter"})
_ALL = (1 << 31) - 1
"""More calls than a tail has."""
_IN_TAIL = (Mode.LOG, Mode.EXCHANGE)


class StoppedError(Exception):
    """A newer recovery began while a collective was being worked out."""


def _not_known(_theirs: bytes, _mine: bytes, _buffers: Sequence[torch.Tensor]) -> None:
    return None


class _Asked(NamedTuple):
    """One call of a collective, as its arguments came."""

    group: ResilientGroup
    verb: str
    args: tuple[Any, ...]
    key: tuple[str, int]
    header: bytes


class LoggedTail:
    """The tail of one rank."""

    def __init__(
        self,
        conductor: Conductor,
        peers: Tails,
        finish: Callable[[Callable[[], dist.Work]], dist.Work],
        replicas: Callable[[], Sequence[Sequence[int]]] = tuple,
        of_another: Callable[[bytes, bytes, Sequence[torch.Tensor]], list[torch.Tensor] | None] = _not_known,
    ) -> None:
        """``finish``: see ``Groups.finish``. ``replicas``: the groups of ranks that hold the same parts of a model.
        ``of_another``: see ``TorchRankState``.
        """
        self._replicas = replicas
        self._of_another = of_another
        self._conductor = conductor
        self._peers = peers
        self._finish = finish
        self.mode = Mode.LOG
        """LOG, EXCHANGE or LOOPBACK in a tail; a recovery changes it in the middle of a call."""
        self._commits = 0
        self._sequence: dict[str, int] = {}
        self._finishers: Sequence[int] = ()
        self._count = 0
        self._over = False
        """``exchanged``."""
        self._told_large = self._told_otherwise = False
        self._told_missing = set[str]()
        """In this tail: an evaluation of a divided model comes to many collectives at one line."""
        self._clique: dict[int, Clique] = {}

    def begin(self, commits: int) -> None:
        """The update was applied, the ``commits``-th."""
        self._commits = commits
        self._end_exchange()
        self._sequence.clear()
        self._told_missing.clear()
        self._count = 0
        if self._over:
            self._over = False
            self._peers.completed(0)

    def begin_exchange(self, finishers: Sequence[int]) -> None:
        """From now on collectives are worked out from what was published."""
        self._finishers = finishers
        self._over = False
        self._peers.completed(self._count)

    def exchanged(self) -> None:
        """Whatever this rank has not published by now of this tail will not come."""
        self._over = True
        self._peers.completed(_ALL)

    def close(self) -> None:
        """The Session is over."""
        self._end_exchange()

    def _end_exchange(self) -> None:
        while self._clique:
            self._clique.popitem()[1].close()

    def call(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """Runs a collective, and returns its completed work. Raises UsageError for one that could not be finished."""
        asked = self._asked(group, verb, args)
        given = VERBS[verb].given(args, group.rank())
        data = b"".join(map(bytes_of, given))
        self._log(asked.key, asked.header, data, verb)
        work = self._until_done(asked, given, data)
        self._completed()
        return work

    def _log(self, key: tuple[str, int], header: bytes, data: bytes, verb: str) -> None:
        if not self._peers.log(key, header, data) and not self._told_large:
            self._told_large = True
            detail = {"collective": verb, "bytes": len(data), "call": line()}
            self._conductor.note("tail_too_large", detail)

    def _completed(self) -> None:
        self._count += 1
        self._peers.completed(self._count)

    def _until_done(self, asked: _Asked, given: Tensors, data: bytes) -> dist.Work:
        while True:
            error: BaseException | None = None
            try:
                return self._try(asked)
            except StoppedError:
                pass
            except RuntimeError as failure:
                error = failure
            except UsageError as failure:
                if not asked.group.closed or self.mode is not Mode.LOG:
                    raise
                error = failure  # the group is closed: a recovery has begun
            self._survive(error)
            fill_all(given, data)

    def _survive(self, error: BaseException | None) -> None:
        if not self._conductor.survive(error):
            raise error if error is not None else RuntimeError("a recovery was announced, and did not come about")

    def _try(self, asked: _Asked) -> dist.Work:
        if self.mode is Mode.EXCHANGE:
            return self._exchange(asked)
        if self.mode is Mode.LOOPBACK:
            return asked.group.run_alone(asked.verb, asked.args)
        return self._finish(lambda: asked.group.run(asked.verb, asked.args))

    def _asked(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> _Asked:
        header = _checked_header(verb, args)
        name = group.group_name
        sequence = self._sequence.get(name, 0)
        self._sequence[name] = sequence + 1
        return _Asked(group, verb, args, (name, sequence), header)

    # -- from what was published

    def _exchange(self, asked: _Asked) -> dist.Work:
        verb, me = VERBS[asked.verb], asked.group.rank()
        if verb.move is not None:
            verb.move(me, asked.group.size(), asked.args, lambda member: self._args_of(asked, member))
        else:
            self._reduce(asked)
        return done(asked.args[0] if asked.args else [])

    def _reduce(self, asked: _Asked) -> None:
        me, adder = asked.group.rank(), self._adder(asked)
        results = self._result_of(asked, asked.group.global_ranks[adder]) if me != adder else None
        if results is None:
            results = self._added_up(asked)
            if me == adder:
                self._peers.log_result(asked.key, msgspec.msgpack.encode(results))
        fill_all(VERBS[asked.verb].filled(asked.args, me), results[me if len(results) > 1 else 0])

    def _added_up(self, asked: _Asked) -> list[bytes]:
        """What each member gets; one where all get the same."""
        calls = [self._args_of(asked, member) or self._neutral(asked, member) for member in range(asked.group.size())]
        if not asked.group.adds_up_as_gloo and not _in_any_order(asked.verb, calls):
            self._tell_otherwise(asked)
        averages = [_summed(args) for args in calls]
        self._clique_of(len(calls)).run(asked.verb, calls)
        filled = [VERBS[asked.verb].filled(args, member) for member, args in enumerate(calls)]
        for tensors in filled if any(averages) else ():
            for tensor in tensors:
                _divide(tensor, len(calls))
        results = [b"".join(map(bytes_of, tensors)) for tensors in filled]
        return results[:1] if len(set(results)) == 1 else results

    def _tell_otherwise(self, asked: _Asked) -> None:
        detail = {"collective": asked.verb, "members": asked.group.size()}
        self._conductor.note("tail_added_otherwise", detail)
        if not self._told_otherwise:
            self._told_otherwise = True
            say_aside(
                f"a fault has cut the {asked.verb} at {line()}, behind the update, and gloo has added up what was "
                f"given to {asked.group.backend_shown}: its result may differ from the undisturbed run's in its last "
                "bits, and so may what is computed from it (docs/how-to/after-the-update.md)"
            )

    def _adder(self, asked: _Asked) -> int:
        """Which member does what one is to do: the lowest finisher. One that asks is a finisher itself."""
        return next(member for member, rank in enumerate(asked.group.global_ranks) if rank in self._finishers)

    def _result_of(self, asked: _Asked, adder: int) -> list[bytes] | None:
        """The adder's result, waited for; None if there is none to come."""
        while True:
            completed = self._peers.completed_of(adder)  # before the log: who publishes a result does so first
            call = self._peers.call(adder, asked.key, self._commits)
            if call is not None and call.result is not None:
                return msgspec.msgpack.decode(call.result, type=list[bytes])
            if call is not None and completed > call.place:
                return None  # too large to be published; or the collective was over there before the fault
            self._rest()

    def _args_of(self, asked: _Asked, member: int) -> Args | None:
        """The arguments of a member's call, with its inputs; waits for a finisher's. None: it died before that."""
        rank = asked.group.global_ranks[member]
        call = own = self._call_of(rank, asked.key)
        if call is None and (buffers := self._buffers_of(asked, rank)) is not None:
            self._tell_standing(rank)
            return [buffers], *asked.args[1:]
        if call is None:
            call = self._replicas_call(asked, rank)
            if call is None or call.inputs is not None:
                self._tell_missing(asked, member, rank, stands=call is not None)
        if call is None:
            return None
        if call.inputs is None:
            self._give_up(
                f"a fault cut the tail in which rank {rank} called more collectives than RESILIENT_TAIL_LOG_BYTES "
                f"takes, or larger ones: its part of {asked.verb} at {line()} can't be had again"
            )
        verb, args = call_of(call.header)
        if own is not None and word_of(verb, args) != word_of(asked.verb, asked.args):
            theirs, mine = told(call.header), told(asked.header)
            raise UsageError(f"after the update rank {rank} calls {theirs} where this rank calls {mine} at {line()}")
        fill_all(VERBS[verb].given(args, member), call.inputs)
        return args

    def _call_of(self, rank: int, key: tuple[str, int]) -> LoggedCall | None:
        """What the rank has published; waits for a finisher. None: it died before it came there."""
        while (call := self._peers.call(rank, key, self._commits)) is None and rank in self._finishers:
            self._rest()
        return call

    def _replicas_call(self, asked: _Asked, rank: int) -> LoggedCall | None:
        """What stands for what a lost rank would have given to a gather, where a model is divided: what another one has
        given that holds the same part. Its group is another one as a rule, so it goes by the place in the tail.
        """
        others = [each for group in self._replicas() if rank in group for each in group if each != rank]
        if "gather" not in asked.verb or carries_objects() or not others:
            return None
        mine = self._peers.call(self._peers.rank, asked.key, self._commits)
        if mine is None or not mine.header:
            return LoggedCall(b"", None)  # no room for more calls: theirs have none either
        for other in others:
            call = self._call_at(other, mine.place)
            if call is not None and call.header and call_of(call.header)[0] == asked.verb:
                return call
        return None

    def _buffers_of(self, asked: _Asked, rank: int) -> torch.Tensor | None:
        """What DDP would have given of a lost rank's buffers in front of a forward pass (an evaluation's): they are as
        that rank had published them, if this one's are.
        """
        wrapper = synced() if asked.verb == "broadcast" else None
        if wrapper is None:
            return None
        theirs, mine = (self._peers.own_state(each, self._commits) for each in (rank, self._peers.rank))
        if theirs is None or mine is None:
            return None
        given: torch.Tensor = asked.args[0][0]
        return coalesced(wrapper, given, lambda buffers: self._of_another(theirs, mine, buffers))

    def _call_at(self, rank: int, place: int) -> LoggedCall | None:
        """Waits for a finisher that may come to it yet."""
        while True:
            over = self._peers.completed_of(rank) == _ALL  # before the log: who is over has published before
            call = self._peers.call_at(rank, place, self._commits)
            if call is not None or over or rank not in self._finishers:
                return call
            self._rest()

    def _tell_standing(self, rank: int) -> None:
        told = (
            f"rank {rank} died before it came to {line()}, where DistributedDataParallel gives its buffers to all: "
            "they stand as they were when its gradients were ready, which is right unless it alone has written them "
            "behind the update (docs/how-to/after-the-update.md)"
        )
        if told not in self._told_missing:
            self._told_missing.add(told)
            self._conductor.note("tail_buffers_stand", {"of": rank})
            say_aside(told)

    def _tell_missing(self, asked: _Asked, member: int, rank: int, *, stands: bool) -> None:
        """A rank died before it came to the collective. ``stands``: a replica's input does for its own."""
        if asked.verb in _SOURCE_NEEDED or carries_objects():
            self._give_up(
                f"rank {rank} died in the tail of update {self._commits - 1} before it came to the {asked.verb} at "
                f"{line()}: nobody knows what it would have sent"
            )
        # Of what all look at, one tells; what is gathered at a root, nobody else looks at.
        tells = asked.verb == "gather" or asked.group.rank() == self._adder(asked)
        if tells and VERBS[asked.verb].given(call_of(asked.header)[1], member):
            self._conductor.note("tail_input_missing", {"collective": asked.verb, "of": rank, "replica": stands})
            instead = "what a replica has given stands" if stands else "a neutral element, or zeros, stand"
            so = ", if that was not a part of the model," if stands else ""
            told = (
                f"rank {rank} died, lost memory, or ended its step, before it came to the {asked.verb} at {line()}: "
                f"{instead} for its input, so{so} its result is not that of the undisturbed run, nor is what is "
                "computed from it (docs/how-to/after-the-update.md)"
            )
            if told not in self._told_missing:
                self._told_missing.add(told)
                say_aside(told)

    def _neutral(self, asked: _Asked, member: int) -> Args:
        """Arguments like this rank's own, with inputs that change no result."""
        _, args = call_of(asked.header)
        for tensor in VERBS[asked.verb].given(args, member):
            _fill_neutral(tensor, args)
        return args

    def _give_up(self, why: str) -> NoReturn:
        self._conductor.give_up_tail(why)
        while True:
            self._rest()

    def _rest(self) -> None:
        if self._conductor.stopped():
            raise StoppedError
        time.sleep(_POLL_S)

    def _clique_of(self, size: int) -> Clique:
        if size not in self._clique:
            try:
                self._clique[size] = Clique(size)
            except UsageError as error:
                self._give_up(
                    f"a fault cut the tail of update {self._commits - 1}, and it can't be worked out: {error}"
                )
        return self._clique[size]

    # -- messages from one rank to another

    def message(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """Sends or receives. What is sent is published before, so that the receiver finds it there after a fault."""
        channel, number = group.number(verb, args)
        if group.takes_from_any and verb != "send":
            raise UsageError(
                f"{line()}: a receive from any source makes it unknown which message comes next, so that those "
                "after the update could not be told apart after a fault: name the source (src=)"
            )
        work = Message(self, group, verb, args, (channel, number))
        if verb == "send":
            self._log(work.key, _checked_header(verb, args), b"".join(map(bytes_of, args[0])), verb)
            self._completed()
        if self.mode is Mode.LOG:
            work.post()
        return work

    @property
    def place(self) -> int | None:
        """After how many updates the tail is that runs now; None in the body of a step."""
        return self._commits if self.mode in _IN_TAIL or self.mode is Mode.LOOPBACK else None

    def end_message(self, work: Message, timeout: Any) -> None:
        """Waits for a message of this tail. Where ``timeout`` is over gloo closes all connections, on both sides: then
        a recovery brings the message.
        """
        while True:
            error: BaseException | None = None
            try:
                if self.mode is Mode.EXCHANGE:
                    self._deliver(work)
                elif self.mode is Mode.LOG:
                    work.wait_inner(timeout)
                return
            except StoppedError:
                pass
            except (RuntimeError, UsageError) as failure:
                if self.mode is not Mode.LOG:
                    raise
                error = failure
            self._survive(error)

    def _deliver(self, work: Message) -> None:
        if work.verb == "send":
            return
        rank = work.group.global_ranks[work.args[1]]
        call = self._call_of(rank, work.key)
        if call is None:
            self._give_up(
                f"rank {rank} died in the tail of update {self._commits - 1} before it sent what rank "
                f"{self._peers.rank} receives at {work.where}: nobody knows what that would have been"
            )
        if call.inputs is None:
            self._give_up(
                f"a fault cut the tail in which rank {rank} sent more than RESILIENT_TAIL_LOG_BYTES takes to rank "
                f"{self._peers.rank}, which receives it at {work.where}: it can't be had again"
            )
        fill_all(work.args[0], call.inputs)


class Message(dist.Work):
    """One message of a tail."""

    def __init__(
        self, tail: LoggedTail, group: ResilientGroup, verb: str, args: tuple[Any, ...], key: tuple[str, int]
    ) -> None:
        super().__init__()
        self.group, self.verb, self.args, self.key = group, verb, args, key
        self.where = line()
        self._tail = tail
        self._place = tail.place
        self._inner: dist.Work | None = None
        self._error: BaseException | None = None
        self._done = False

    def post(self) -> None:
        """Gives it to the group. An error is kept for who waits."""
        try:
            self._inner = self.group.run_inner(self.verb, self.args)
        except (RuntimeError, UsageError) as error:
            self._error = error

    def wait_inner(self, timeout: Any) -> None:
        """Waits for the group's work. Raises what that failed with, again and again."""
        if self._inner is None:
            raise self._error if self._error is not None else RuntimeError("a fault has cut the message")
        self._inner.wait(*(() if timeout is None else (timeout,)))

    def wait(self, timeout: Any = None) -> bool:
        """Raises RuntimeError if a fault has cut a message that is waited for after its own tail."""
        if self._done:
            return True
        if self._place == self._tail.place:
            self._tail.end_message(self, timeout)
        else:
            self._wait_late(timeout)
        self._done = True
        return True

    def _wait_late(self, timeout: Any) -> None:
        try:
            self.wait_inner(timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"a fault has cut the message that was begun after an update, at {self.where}, and is waited for in a "
                "later step: wait for it before the step ends"
            ) from error

    def is_completed(self) -> bool:
        return self._done  # as gloo: not before it was waited for

    def source_rank(self) -> int:
        return int(self.args[1])

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()


def _checked_header(verb: str, args: tuple[Any, ...]) -> bytes:
    try:
        check_repeatable(verb, args)
        return header_of(verb, args)
    except UsageError as error:
        raise UsageError(f"{line()}: {verb} after the update can't be finished after a fault: {error}") from None


def _in_any_order(verb: str, calls: Sequence[Args]) -> bool:
    """Whether a reduction comes to the same bits in whatever order it is done."""
    kinds: Any = dist.ReduceOp.RedOpType
    rounds = any(map(_rounds, VERBS[verb].given(calls[0], 0)))
    return not rounds or len(calls) <= 2 or _operation_of(calls[0]) in (kinds.MIN, kinds.MAX)


def _divide(sums: torch.Tensor, count: int) -> None:
    """Whole numbers stay such, and do not go by way of a float, which has 24 bits."""
    sums.div_(count, rounding_mode=None if _rounds(sums) else "trunc")


def _rounds(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _summed(args: Args) -> bool:
    """Has a call that averages add up instead, for gloo knows no average, and says whether it was one."""
    kinds: Any = dist.ReduceOp.RedOpType
    averages = [each for each in args if hasattr(each, "reduceOp") and each.reduceOp.op == kinds.AVG]
    for options in averages:
        options.reduceOp = dist.ReduceOp.SUM
    return bool(averages)


def _operation_of(args: Sequence[Any]) -> Any:
    kinds: Any = dist.ReduceOp.RedOpType  # torch's stub leaves its members out
    return next((value.reduceOp.op for value in args if hasattr(value, "reduceOp")), kinds.SUM)


def _fill_neutral(tensor: torch.Tensor, args: Sequence[Any]) -> None:
    """With the element that changes no result: 0 for a sum, 1 for a product, the ends of the range for extremes."""
    kinds: Any = dist.ReduceOp.RedOpType
    operation = _operation_of(args)
    if operation == kinds.PRODUCT:
        tensor.fill_(1)
    elif operation == kinds.BAND:
        tensor.zero_().bitwise_not_()
    elif operation in (kinds.MIN, kinds.MAX):
        tensor.fill_(_extreme(tensor.dtype, largest=operation == kinds.MIN))
    else:
        tensor.zero_()


def _extreme(dtype: torch.dtype, *, largest: bool) -> float:
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point:
        return float("inf") if largest else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if largest else limits.min
