"""Collectives that the loop calls after the update (logging, early stopping): the tail of a step.

They cannot be redone with the step, because the update is applied. So each one's arguments are published before it
runs. After a fault every rank takes part once more, over the rebuilt group, in the collectives that some rank still
lacks: with the published arguments where it had completed them, and a replacement with those of the dead rank. The same
inputs over the same kind of group give the same bits. If the dead rank had not come to a collective, its input never
existed; its replacement then contributes the neutral element of the reduction, and an event says so.

All ranks must call the same collectives in the same order in a tail, as SPMD programs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from resilient_train.errors import UsageError
from resilient_train.frameworks.base import Conductor, TailLog
from resilient_train.frameworks.torch.group import ResilientGroup
from resilient_train.frameworks.torch.leaves import dense, dtype_of, span_of
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


class Tail:
    """The tail of one rank. ``completed`` counts its collectives; to be set to 0 when an update was applied."""

    def __init__(
        self,
        conductor: Conductor,
        log: TailLog,
        groups: dict[str, ResilientGroup],
        neutral: Callable[[str], None],
    ) -> None:
        self._conductor = conductor
        self._log = log
        self._groups = groups
        self._note_neutral = neutral
        self.completed = 0

    def run(self, group: ResilientGroup, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Runs a collective so that a fault in it is survived. Returns its completed work."""
        tensors: list[torch.Tensor] = []
        meta = msgspec.msgpack.encode([verb, group.group_name, _encode([list(args), kwargs], tensors)])
        data = [_bytes_of(tensor) for tensor in tensors]
        logged = self._log.log(meta, b"".join(data))
        while True:
            try:
                work = group.run(verb, args, kwargs)
                work.wait()
                break
            except (RuntimeError, UsageError) as error:
                if not logged:
                    raise UsageError(
                        f"a fault cut {verb} of {sum(map(len, data))} bytes, called after the update; it was too large "
                        "to be kept for a repetition (RESILIENT_TAIL_LOG_BYTES)"
                    ) from error
                if not self._conductor.survive(error):
                    raise
                for tensor, content in zip(tensors, data, strict=True):
                    _fill(tensor, content)
        self.completed += 1
        self._log.tail_completed(self.completed)
        return work

    def replay(self, start: int) -> None:
        """Takes part again in own collectives from ``start`` on; their results are known already."""
        for index in range(start, self.completed):
            self._repeat(*self._log.logged(index))

    def ghost(self, start: int, entries: Iterator[tuple[bytes, bytes | None]]) -> None:
        """Takes part, from ``start`` on, in the collectives of a tail that this process never ran.

        ``entries`` are all of the tail's; data None says that the dead rank had not come to it. Such a one is logged as
        if it had been this rank's own call: a second fault may ask for it again. The others are in the log already.
        """
        for index, (meta, known) in enumerate(entries):
            data = self._neutral(meta) if known is None else known
            if known is None:
                self._log.log(meta, data)
            if index >= start:
                self._repeat(meta, data)
            self.completed = index + 1
            self._log.tail_completed(self.completed)

    def _repeat(self, meta: bytes, data: bytes) -> None:
        verb, name, coded = msgspec.msgpack.decode(meta)
        group = self._groups.get(name)
        if group is None:
            return
        tensors: list[torch.Tensor] = []
        args, kwargs = _decode(coded, tensors)
        offset = 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            _fill(tensor, data[offset : offset + size])
            offset += size
        group.run(verb, tuple(args), kwargs).wait()

    def _neutral(self, meta: bytes) -> bytes:
        verb, _, coded = msgspec.msgpack.decode(meta)
        tensors: list[torch.Tensor] = []
        args, _ = _decode(coded, tensors)
        value = _neutral_of(args)
        for tensor in tensors:
            integral = not tensor.dtype.is_floating_point
            tensor.fill_(_extreme(tensor, value) if integral and abs(value) == float("inf") else value)
        self._note_neutral(verb)
        return b"".join(_bytes_of(tensor) for tensor in tensors)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    kept = dense(tensor)
    return bytes(view(span_of(kept)))


def _fill(tensor: torch.Tensor, content: bytes) -> None:
    if tensor.numel():
        with torch.no_grad():
            tensor.copy_(torch.frombuffer(bytearray(content), dtype=tensor.dtype).view(tensor.shape))


def _encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"T": [str(value.dtype), list(value.shape)]}
    if isinstance(value, (list, tuple)):
        return [_encode(item, tensors) for item in value]
    if isinstance(value, dict):
        return {"D": {key: _encode(item, tensors) for key, item in value.items()}}
    name = type(value).__name__
    if name in _OPTIONS:
        fields = {field: getattr(value, field) for field in _FIELDS if hasattr(value, field)}
        if hasattr(value, "reduceOp"):
            fields["reduceOp"] = int(value.reduceOp.op)
        return {"O": [name, fields]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"a collective after the update was called with a {name}, which can't be kept for a repetition")


def _decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, body),) = value.items()
    if tag == "T":
        tensors.append(torch.zeros(body[1], dtype=dtype_of(body[0])))
        return tensors[-1]
    if tag == "D":
        return {key: _decode(item, tensors) for key, item in body.items()}
    name, fields = body
    options = _OPTIONS[name]()
    for field, content in fields.items():
        setattr(options, field, _reduce_op(content) if field == "reduceOp" else content)
    return options


def _reduce_op(number: int) -> Any:
    return dist.ReduceOp(dist.ReduceOp.RedOpType(number))


def _neutral_of(args: list[Any]) -> float:
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
