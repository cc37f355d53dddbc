"""NaN in what a job holds or saves, and which tensors of a shard's image have one.

A NaN that is in the state once spreads with the next step, and no update takes it out again. Infinity is not looked
for: a mask may be made of it.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import msgspec

from resilient_train._native import holds_nan
from resilient_train.state.image import LENGTH, header_length, parse_header


class NanFound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some tensors hold a NaN."""

    tensors: int
    """How many."""
    of: int
    first: str
    """The name of one of them."""

    def __str__(self) -> str:
        return f"NaN in {self.tensors} of {self.of} tensors ({self.first!r} for one)"


LARGEST = {
    "F64": (8, 0x7FF0_0000_0000_0000),
    "F32": (4, 0x7F80_0000),
    "C64": (4, 0x7F80_0000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E5M2": (1, 0x7C),
    "F8_E4M3": (1, 0x7E),
}
"""By the element types' names in safetensors: bytes of a number, and the largest one's bits."""


def tensors_with_nan(image: memoryview, size_bytes: int) -> tuple[AbstractSet[str], AbstractSet[str]]:
    """The names of the tensors in an image (``state/image.py``) of so many bytes, and of those that hold a NaN.

    Raises CheckpointError for what is no image.
    """
    whole = image[:size_bytes]
    begin = LENGTH.size
    length = header_length("the image", bytes(whole[:begin]), size_bytes)
    header = parse_header("the image", bytes(whole[begin : begin + length]), size_bytes)
    found = set()
    for piece, start in header.places:
        if piece.dtype in LARGEST and holds_nan(whole[start : start + piece.size_bytes], *LARGEST[piece.dtype]):
            found.add(piece.name)
    return {piece.name for piece, _ in header.places}, found
