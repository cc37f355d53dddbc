"""torch's tensors as the pieces of a checkpoint: where they lie, and how they are filled again at any world size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from resilient_train.errors import StateError
from resilient_train.frameworks.torch.tensors.leaves import TENSORS, is_sharded, local, span_of
from resilient_train.state.sharding import ITEM_BYTES, Piece, Shape
from resilient_train.state.transfer import Span
from resilient_train.state.tree import Path, flatten

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.int64: "I64", torch.uint64: "U64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip


class Contents(NamedTuple):
    """A tree of state as a checkpoint holds it."""

    payload: bytes
    """The tree without its tensors, for ``Draft.add_tree``."""
    tensors: dict[str, torch.Tensor]
    """By the names that they have in the shards, in the order of their numbers in ``payload``."""


def contents(tree: Any) -> Contents:
    """Takes a tree of state apart. Raises StateError for what can't be carried."""
    payload, tensors = flatten(tree, TENSORS)
    return Contents(payload, dict(zip(names_of(tensors), tensors.values(), strict=True)))


def names_of(paths: Iterable[Path]) -> list[str]:
    """The paths with dots between: ``model.0.layer.weight``. Those that would be equal get a number behind."""
    joined = [".".join(map(str, path)) for path in paths]
    count = Counter(joined)
    taken = {name for name, times in count.items() if times == 1}
    result = []
    for name in joined:
        unique, number = name, 0
        while count[name] > 1 and unique in taken:
            number += 1
            unique = f"{name}~{number}"
        taken.add(unique)
        result.append(unique)
    return result


def piece_of(name: str, tensor: torch.Tensor) -> Piece:
    """What this rank holds of a tensor: all of a plain one, the local block of a DTensor.

    A dtype that safetensors lacks is held as its bytes, in one more dimension. Raises StateError for a DTensor whose
    part here is not one block.
    """
    dtype = _NAMES.get(tensor.dtype, "U8")
    tail: Shape = () if tensor.dtype in _NAMES else (tensor.element_size(),)
    shape, offsets = _block(name, tensor)
    whole = tuple(tensor.shape)
    return Piece(name, dtype, shape + tail, whole + tail, offsets + (0,) * len(tail))


def _block(name: str, tensor: torch.Tensor) -> tuple[Shape, Shape]:
    """(shape, offsets) of this rank's part; DTensor tells torch.distributed.checkpoint the same."""
    if not is_sharded(tensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    blocks = tensor.__create_chunk_list__()
    if len(blocks) != 1:
        raise StateError(f"{name!r} lies in {len(blocks)} pieces on this rank; a checkpoint takes one")
    return tuple(blocks[0].sizes), tuple(blocks[0].offsets)


def memory_of(piece: Piece, tensor: torch.Tensor) -> Span:
    """Where the bytes of a piece lie; the tensor lies dense in this process.

    The piece is what ``piece_of`` says of the tensor, or what ``divide`` has cut from that.
    """
    memory = span_of(local(tensor))
    skipped = skipped_bytes(piece, tensor)
    assert skipped + piece.size_bytes <= memory.size
    return Span(memory.address + skipped, piece.size_bytes)


def skipped_bytes(piece: Piece, tensor: torch.Tensor) -> int:
    """Where a piece of a tensor begins, in the tensor's memory on this rank."""
    held = piece_of(piece.name, tensor)
    skipped, stride = 0, ITEM_BYTES[piece.dtype]
    for axis in reversed(range(len(held.shape))):
        skipped += (piece.offsets[axis] - held.offsets[axis]) * stride
        stride *= held.shape[axis]
    return skipped
