"""Text to train on that every Python brings along: the language topics of ``pydoc`` (half a megabyte).

Deterministic for one version of Python; nothing is downloaded.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 128
"""ASCII; any other byte is read as its low seven bits."""


def corpus() -> bytes:
    """All topics in the order of their names, as ASCII."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return bytes(byte & 0x7F for byte in text.encode())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of ``length`` characters; each item is (inputs, the same moved on by one)."""

    def __init__(self, length: int) -> None:
        assert length > 0
        self.length = length
        self._characters = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._characters) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        piece = self._characters[start : start + self.length + 1].long()
        return piece[:-1], piece[1:]
