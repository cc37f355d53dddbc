"""Calls of collectives, written down: what outlives the process that made them, and is compared with another's.

A *header* is the verb and its arguments without what is in the tensors: of these, dtype and shape. The bytes of tensors
stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from resilient_train.errors import UsageError
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
_REDUCE_OP = "reduceOp"


def header_of(verb: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """Raises UsageError for an argument that can't be written down."""
    return msgspec.msgpack.encode([verb, *_encode([list(args), kwargs])])


def call_of(header: bytes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The verb, and its arguments; tensors are zeros."""
    verb, args, kwargs = msgspec.msgpack.decode(header)
    return verb, tuple(_decode(args)), _decode(kwargs)


def told(header: bytes) -> str:
    """The call for people: ``broadcast(float32[4, 2], rootRank 1)``."""
    verb, args, kwargs = msgspec.msgpack.decode(header)
    return f"{verb}({', '.join(_words([args, kwargs]))})"


def bytes_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """What is in the tensors, one after the other."""
    return b"".join(bytes(view(span_of(dense(tensor)))) for tensor in tensors if tensor.numel())


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """How many bytes that is."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fill_all(tensors: Iterable[torch.Tensor], data: bytes) -> None:
    """The inverse of ``bytes_of``."""
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
        return {"T": [str(value.dtype), list(value.shape)]}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {"D": {key: _encode(item) for key, item in value.items()}}
    name = type(value).__name__
    if name in _OPTIONS:
        fields = {field: getattr(value, field) for field in _FIELDS if hasattr(value, field)}
        if hasattr(value, _REDUCE_OP):
            fields[_REDUCE_OP] = int(value.reduceOp.op)
        return {"O": [name, fields]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"a collective was called with a {name}, which can't be kept for a repetition")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, body),) = value.items()
    if tag == "T":
        return torch.zeros(body[1], dtype=dtype_of(body[0]))
    if tag == "D":
        return {key: _decode(item) for key, item in body.items()}
    name, fields = body
    options = _OPTIONS[name]()
    for field, content in fields.items():
        setattr(options, field, _reduce_op(content) if field == _REDUCE_OP else content)
    return options


def _reduce_op(number: int) -> Any:
    return dist.ReduceOp(dist.ReduceOp.RedOpType(number))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _words(item)
        return
    if not isinstance(value, dict):
        yield str(value)
        return
    ((tag, body),) = value.items()
    if tag == "T":
        yield f"{body[0].removeprefix('torch.')}{body[1]}"
        return
    for name, content in (body if tag == "D" else body[1]).items():
        if name == "rootTensor" and not content:
            continue
        words = dist.ReduceOp.RedOpType(content).name if name == _REDUCE_OP else ", ".join(_words(content))
        yield f"{name} {words}"
