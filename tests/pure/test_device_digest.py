"""The digest that a device makes of its memory, here on the host's."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from resilient_train._native import Copier
from resilient_train.frameworks.torch.tensors import device_digest as module
from resilient_train.frameworks.torch.tensors import fingerprint as fingerprints
from resilient_train.frameworks.torch.tensors.device_digest import device_digest
from resilient_train.frameworks.torch.tensors.fingerprint import TorchFingerprint, tensor_digest

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip


def digest(tensor: torch.Tensor) -> int:
    found = device_digest(tensor)
    assert (found.dtype, found.shape) == (torch.int64, ())
    return int(found)


def flipped(tensor: torch.Tensor, byte: int, mask: int) -> torch.Tensor:
    data = tensor.clone().view(torch.uint8).view(-1)
    data[byte] ^= mask
    return data.view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 8, 9])
def test_every_bit_counts(dtype: torch.dtype, count: int) -> None:
    whole = torch.randint(0, 2, (count,)).to(dtype)
    known = {digest(whole)}
    size = count * whole.element_size()
    if dtype is torch.bool:
        known |= {digest(torch.eye(count, dtype=torch.bool)[at] ^ whole) for at in range(count)}
        assert len(known) == count + 1
        return
    known |= {digest(flipped(whole, byte, 1 << bit)) for byte in range(size) for bit in range(8)}
    assert len(known) == 8 * size + 1


def test_two_signs_that_change_together_show() -> None:
    """In a weighted sum modulo 2^64 the two would take each other away."""
    values = torch.randn(64, dtype=torch.float64)
    known = {digest(values)}
    for one, other in itertools.combinations(range(64), 2):
        changed = values.clone()
        changed[[one, other]] *= -1
        known.add(digest(changed))
    assert len(known) == 64 * 63 // 2 + 1


def test_places_count() -> None:
    values = torch.arange(40.0)
    chance = random.Random(3)
    known = set()
    for _ in range(2000):
        order = list(range(40))
        chance.shuffle(order)
        known.add(digest(values[order]))
    assert len(known) == 2000
    assert digest(torch.zeros(8)) != digest(torch.zeros(16)), "zeros have places too"


@pytest.mark.parametrize("count", [7, 8, 20, 33])
def test_pieces_are_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    values = torch.randn(count, dtype=torch.float64)
    whole = digest(values)
    monkeypatch.setattr(module, "_WORDS", 8)
    assert digest(values) == whole


def test_how_it_lies_does_not_count() -> None:
    values = torch.randn(6, 10)
    assert digest(values.t()) == digest(values.t().contiguous())
    assert digest(torch.cat([torch.zeros(1), values.view(-1)])[1:]) == digest(values), (
        "four bytes behind a word's begin"
    )
    assert digest(torch.nn.Parameter(values)) == digest(values)


def test_of_a_device_the_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fingerprint reads host memory by the copier, and leaves the rest where it is; both count."""
    monkeypatch.setattr(fingerprints, "_on_device", lambda tensor: tensor.dtype is torch.float32)
    monkeypatch.setattr(fingerprints, "dense", _host_only)
    tree = {"here": torch.ones(5, dtype=torch.float64), "there": torch.ones(7), "n": 3}
    known = {TorchFingerprint(tree, Copier()).digest()}
    for name in ("here", "there"):
        changed = {**tree, name: tree[name].clone()}
        changed[name][4] = 2
        known |= {TorchFingerprint(changed, Copier()).digest(), tensor_digest(changed[name])}
    known.add(TorchFingerprint({**tree, "there": torch.ones(8)}, Copier()).digest())
    assert len(known) == 6
    assert TorchFingerprint(tree, Copier()).digest() in known


def _host_only(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.dtype is not torch.float32, "it was to stay on its device"
    return tensor.detach().contiguous()
