"""The call of a collective as bytes: the verb and its arguments in a header, and the elements of its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from resilient_train.errors import UsageError
from resilient_train.frameworks.torch.communication.call_forms import OPTIONS
from resilient_train.frameworks.torch.communication.collective_results import AS_IT_LIES, is_dense
from resilient_train.frameworks.torch.tensors.leaves import dense, dtype_of, span_of
from resilient_train.state.transfer import view

_FIELDS = ("rootRank", "rootTensor")
_PREMUL_SUM = dist.ReduceOp.RedOpType.PREMUL_SUM  # type: ignore[attr-defined] # torch's stub leaves it out


def header_of(verb: str, args: Sequence[Any]) -> bytes:
    """Raises UsageError for an argument that can't be written down."""
    return msgspec.msgpack.encode([verb, _encode(list(args))])


def check_repeatable(verb: str, args: Sequence[Any]) -> None:
    """Raises UsageError for a call that can't be made again of its header and inputs, as gloo would have made it."""
    for tensor in _tensors_in(args):
        if tensor.layout is not torch.strided:
            raise UsageError(f"its tensor has the layout {tensor.layout}, which can't be kept for a repetition")
    if verb in AS_IT_LIES and not all(map(is_dense, _tensors_in(args[:2]))):
        raise UsageError(
            "its tensor does not lie in one piece of memory, as gloo takes it to: pass tensor.contiguous()"
        )
    if any(hasattr(each, "reduceOp") and each.reduceOp.op == _PREMUL_SUM for each in args):
        raise UsageError("its PREMUL_SUM has a factor that can't be kept for a repetition: multiply first")


def call_of(header: bytes) -> tuple[str, tuple[Any, ...]]:
    """The verb, and new arguments like those of the call; tensors hold zeros."""
    verb, args = msgspec.msgpack.decode(header)
    return verb, tuple(_decode(args))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in the order of their indices, wherever they lie."""
    if not tensor.numel():
        return b""
    kept = dense(tensor)
    return bytes(view(span_of(kept)))


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """How many bytes their elements take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def told(header: bytes) -> str:
    """The call for people: ``broadcast(float32[4, 2], rootRank 1)``."""
    verb, args = msgspec.msgpack.decode(header)
    return f"{verb}({', '.join(_words(args))})"


def fill_all(tensors: Sequence[torch.Tensor], data: bytes) -> None:
    """Puts back what ``bytes_of`` gave for one after the other."""
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
        strided = value.layout is torch.strided and not value.is_contiguous() and is_dense(value)
        return {"S": [dtype, shape, list(value.stride())]} if strided else {"T": [dtype, shape]}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    name = type(value).__name__
    if name in OPTIONS:
        fields = {field: getattr(value, field) for field in _FIELDS if hasattr(value, field)}
        if hasattr(value, "reduceOp"):
            fields["reduceOp"] = int(value.reduceOp.op)
        return {"O": [name, fields]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"its argument is a {name}, which can't be kept for a repetition")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, body),) = value.items()
    if tag == "T":
        return torch.zeros(body[1], dtype=dtype_of(body[0]), device="cpu")
    if tag == "S":
        return torch.empty_strided(body[1], body[2], dtype=dtype_of(body[0]), device="cpu").zero_()
    name, fields = body
    options = OPTIONS[name]()
    for field, content in fields.items():
        setattr(options, field, _reduce_op(content) if field == "reduceOp" else content)
    return options


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for item in value for each in _tensors_in(item)] if isinstance(value, (list, tuple)) else []


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
    if tag in "TS":
        yield f"{body[0].removeprefix('torch.')}{body[1]}"
        return
    for name, content in body[1].items():
        if name == "rootTensor" and not content:
            continue
        words = dist.ReduceOp.RedOpType(content).name if name == "reduceOp" else ", ".join(_words(content))
        yield f"{name} {words}"
