"""A digest of memory on a device, made there: what crosses to the host are eight bytes.

Each word of eight bytes is mixed with its place by steps that can be undone (an odd factor, a shifted xor: those of
splitmix64, G. Steele, D. Lea, C. Flood, 2014), and the results are added up modulo 2^64. So one word that differs
always shows, and several do but for a chance of 2^-64. Whole numbers are added the same in any order. A plain weighted
sum would be faster, and two signs that have changed would not show in it.
"""

from __future__ import annotations

import torch

_WORDS = 1 << 22
"""So many at a time: two pieces of 32 MiB are what it needs beside the tensor."""
_PLACE, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""splitmix64's step and factors, as signed numbers."""
_LOW = (1 << 32) - 1


def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Of the bytes of a strided tensor in the order of its elements: one int64 on its device, not waited for."""
    words = _words(tensor.detach())
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, words.numel(), _WORDS):
        piece = words[begin : begin + _WORDS]
        mixed = torch.arange(begin, begin + piece.numel(), device=tensor.device)
        mixed.mul_(_PLACE).add_(piece).mul_(_FIRST)
        # The sign is not to be drawn along: that could not be undone.
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW)).mul_(_SECOND)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW))
        found += mixed.sum()
    return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes as int64, with zeros behind them where they are no whole number of words."""
    flat = tensor.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    size = flat.element_size()
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0 and flat.data_ptr() % 8 == 0:
        return flat.view(torch.int64)
    data = flat.view(torch.uint8)
    return torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
