"""Collectives that the loop calls after the update (logging, early stopping): the tail of a step.

They can't be redone with the step, because the update is applied. So what each rank gives to one is published before it
runs. After a fault nobody runs them over a group again: whoever still runs the tail (a *finisher*) works out each
collective from what its members have published. A rank that died has published what it had come to; a finisher
publishes when it comes there. Movement verbs are copied together by each; a reduction is added up by the lowest
finisher among the members, as the library would have, and its result is published for the others.

What a dead rank had not come to never existed. A reduction and a gather go on without: with the element that changes
nothing, and zeros (event ``tail_input_missing``). A broadcast or scatter whose source it was can't.

All members of a group call the same collectives of it in the same order, as SPMD programs do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from resilient_train.errors import UsageError
from resilient_train.frameworks.base import Call, Conductor, Peers
from resilient_train.frameworks.torch.clique import Clique
from resilient_train.frameworks.torch.group import ResilientGroup
from resilient_train.frameworks.torch.leaves import dense, dtype_of, span_of
from resilient_train.frameworks.torch.verbs import AS_IT_LIES, VERBS, Tensors, done, is_dense
from resilient_train.protocol.rank_effects import Mode
from resilient_train.state.transfer import view

_OPTIONS = {
    name: getattr(c10d, name)
    for name in [
        "AllreduceOptions",
        "AllreduceCoalescedOptions",
        "BroadcastOptions",
        "ReduceOptions",
        "AllgatherOptions",
        "GatherOptions",
        "ScatterOptions",
        "ReduceScatterOptions",
        "AllToAllOptions",
        "BarrierOptions",
    ]
}
_FIELDS = ("rootRank", "rootTensor")
_POLL_S = 0.0002
_SOURCE_NEEDED = frozenset({"broadcast", "scatter"})


class StoppedError(Exception):
    """A newer recovery began while a collective was being worked out."""


class _Asked(NamedTuple):
    """One call of a collective, as its arguments came."""

    group: ResilientGroup
    verb: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: tuple[str, int]
    header: bytes


class Tail:
    """The tail of one rank."""

    def __init__(self, conductor: Conductor, peers: Peers) -> None:
        self._conductor = conductor
        self._peers = peers
        self.mode = Mode.LOG
        """LOG, EXCHANGE or LOOPBACK; a recovery changes it in the middle of a call."""
        self._commits = 0
        self._sequence: dict[str, int] = {}
        self._finishers: Sequence[int] = ()
        self._count = 0
        self._told_large = False
        self._clique: dict[int, Clique] = {}

    def begin(self, commits: int) -> None:
        """The update was applied, the ``commits``-th."""
        self._commits = commits
        self._end_exchange()
        if self._count:
            self._sequence.clear()
            self._count = 0

    def begin_exchange(self, finishers: Sequence[int]) -> None:
        """From now on collectives are worked out from what was published."""
        self._finishers = finishers

    def close(self) -> None:
        """The Session is over."""
        self._end_exchange()

    def _end_exchange(self) -> None:
        while self._clique:
            self._clique.popitem()[1].close()

    def call(self, group: ResilientGroup, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Runs a collective, and returns its completed work."""
        asked = self._asked(group, verb, args, kwargs)
        given = VERBS[verb].given(args, group.rank())
        data = b"".join(_bytes_of(tensor) for tensor in given)
        if not self._peers.log(asked.key, asked.header, data) and not self._told_large:
            self._told_large = True
            self._conductor.note("tail_too_large", {"collective": verb, "bytes": len(data)})
        work = self._until_done(asked, given, data)
        self._count += 1
        self._peers.completed(self._count)
        return work

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
                if asked.group.inner is not None or self.mode is not Mode.LOG:
                    raise
                error = failure  # the group is closed: a recovery has begun
            if not self._conductor.survive(error):
                raise error if error is not None else RuntimeError("a recovery was announced, and did not come about")
            _fill_all(given, data)

    def _try(self, asked: _Asked) -> dist.Work:
        if self.mode is Mode.EXCHANGE:
            return self._exchange(asked)
        if self.mode is Mode.LOOPBACK:
            return asked.group.run_alone(asked.verb, asked.args)
        work = asked.group.run(asked.verb, asked.args, asked.kwargs)
        work.wait()
        return work

    def _asked(self, group: ResilientGroup, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Asked:
        name = group.group_name
        sequence = self._sequence.get(name, 0)
        self._sequence[name] = sequence + 1
        header = msgspec.msgpack.encode([verb, *_encode([list(args), kwargs])])
        return _Asked(group, verb, args, kwargs, (name, sequence), header)

    # -- from what was published

    def _exchange(self, asked: _Asked) -> dist.Work:
        verb, me = VERBS[asked.verb], asked.group.rank()
        if verb.move is not None:
            verb.move(me, asked.group.size(), asked.args, lambda member: self._args_of(asked, member))
        else:
            self._reduce(asked)
        return done(asked.args[0] if asked.args else [])

    def _args_of(self, asked: _Asked, member: int) -> tuple[Any, ...]:
        return self._call_of(asked, member)[0]

    def _reduce(self, asked: _Asked) -> None:
        members = asked.group.global_ranks
        me, adder = asked.group.rank(), self._adder(asked)
        if me == adder:
            calls = [self._call_of(asked, member) for member in range(len(members))]
            self._clique_of(len(members)).run(asked.verb, calls)
            results = [
                b"".join(map(_bytes_of, VERBS[asked.verb].filled(args, member)))
                for member, (args, _) in enumerate(calls)
            ]
            same = len(set(results)) == 1
            self._peers.log_result(asked.key, msgspec.msgpack.encode(results[:1] if same else results))
        else:
            results = self._result_of(asked, members[adder])
        _fill_all(VERBS[asked.verb].filled(asked.args, me), results[me if len(results) > 1 else 0])

    def _adder(self, asked: _Asked) -> int:
        """Which member does what one is to do: the lowest finisher. One that asks is a finisher itself."""
        return next(member for member, rank in enumerate(asked.group.global_ranks) if rank in self._finishers)

    def _result_of(self, asked: _Asked, adder: int) -> list[bytes]:
        while True:
            call = self._peers.call(adder, asked.key, self._commits)
            if call is not None and call.result is not None:
                return msgspec.msgpack.decode(call.result, type=list[bytes])
            self._rest()

    def _call_of(self, asked: _Asked, member: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a member's call, with its inputs; waits for a finisher's. Raises UsageError."""
        rank = asked.group.global_ranks[member]
        while (call := self._peers.call(rank, asked.key, self._commits)) is None:
            if rank not in self._finishers:
                return self._missing(asked, member, rank)
            self._rest()
        verb, args, kwargs = self._decoded(call)
        if verb != asked.verb:
            raise UsageError(f"after the update rank {rank} calls {verb} where this rank calls {asked.verb}")
        if call.inputs is None:
            raise UsageError(
                f"a fault cut the tail in which rank {rank} called {verb} with more than RESILIENT_TAIL_LOG_BYTES "
                "takes: its part can't be had again"
            )
        _fill_all(VERBS[verb].given(args, member), call.inputs)
        return args, kwargs

    def _missing(self, asked: _Asked, member: int, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call that a rank would have made, which died before it came to it."""
        if asked.verb in _SOURCE_NEEDED:
            raise UsageError(
                f"rank {rank} died in the tail of update {self._commits - 1} before it came to the {asked.verb} "
                "that it was the source of: nobody knows what it would have sent"
            )
        _, args, kwargs = self._decoded(Call(asked.header, b""))
        value = _neutral_of(args) if VERBS[asked.verb].move is None else 0.0
        for tensor in VERBS[asked.verb].given(args, member):
            integral = not tensor.dtype.is_floating_point
            tensor.fill_(_extreme(tensor, value) if integral and abs(value) == float("inf") else value)
        if VERBS[asked.verb].given(args, member) and asked.group.rank() == self._adder(asked):
            self._conductor.note("tail_input_missing", {"collective": asked.verb, "of": rank})
        return args, kwargs

    def _decoded(self, call: Call) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        verb, args, kwargs = msgspec.msgpack.decode(call.header)
        return verb, tuple(_decode(args)), _decode(kwargs)

    def _rest(self) -> None:
        if self._conductor.stopped():
            raise StoppedError
        time.sleep(_POLL_S)

    def _clique_of(self, size: int) -> Clique:
        if size not in self._clique:
            self._clique[size] = Clique(size)
        return self._clique[size]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    kept = dense(tensor)
    return bytes(view(span_of(kept)))


def _fill_all(tensors: Sequence[torch.Tensor], data: bytes) -> None:
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            content = bytearray(data[offset : offset + size])
            with torch.no_grad():
                tensor.copy_(torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape))
        offset += size


def _encode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype, shape = str(value.dtype), list(value.shape)
        # Where an element lies decides in which order gloo adds it up.
        strided = not value.is_contiguous() and is_dense(value)
        return {"S": [dtype, shape, list(value.stride())]} if strided else {"T": [dtype, shape]}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {"D": {key: _encode(item) for key, item in value.items()}}
    name = type(value).__name__
    if name in _OPTIONS:
        fields = {field: getattr(value, field) for field in _FIELDS if hasattr(value, field)}
        if hasattr(value, "reduceOp"):
            fields["reduceOp"] = int(value.reduceOp.op)
        return {"O": [name, fields]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"a collective after the update was called with a {name}, which can't be kept for a repetition")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, body),) = value.items()
    if tag == "T":
        return torch.zeros(body[1], dtype=dtype_of(body[0]))
    if tag == "S":
        return torch.empty_strided(body[1], body[2], dtype=dtype_of(body[0])).zero_()
    if tag == "D":
        return {key: _decode(item) for key, item in body.items()}
    name, fields = body
    options = _OPTIONS[name]()
    for field, content in fields.items():
        setattr(options, field, _reduce_op(content) if field == "reduceOp" else content)
    return options


def _reduce_op(number: int) -> Any:
    return dist.ReduceOp(dist.ReduceOp.RedOpType(number))


def _neutral_of(args: Sequence[Any]) -> float:
    """The element that changes no result: 0 for a sum, 1 for a product, an infinity for a minimum or maximum."""
    kinds: Any = dist.ReduceOp.RedOpType  # torch's stub leaves its members out
    for value in args:
        if hasattr(value, "reduceOp"):
            operation = value.reduceOp.op
            return {kinds.PRODUCT: 1.0, kinds.MIN: float("inf"), kinds.MAX: float("-inf"), kinds.BAND: -1.0}.get(
                operation, 0.0
            )
    return 0.0


def _extreme(tensor: torch.Tensor, value: float) -> int:
    limits = torch.iinfo(tensor.dtype)
    return limits.max if value > 0 else limits.min
