"""Tensors of state: they lie elsewhere as they lay here, as far as that can be had."""

from __future__ import annotations

import pytest
import torch
from msgspec import msgpack

from resilient_train.errors import ProtocolError
from resilient_train.frameworks.torch.tensors.leaves import BITS, TENSORS, pack, strides_of, unpack
from resilient_train.state.tree import flatten

X = torch.arange(120.0).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.contiguous(memory_format=torch.channels_last),
        X.permute(3, 0, 2, 1),
        X[0, 0].T,
        torch.linalg.eigh(torch.eye(4))[1],
        X[..., :4],  # with gaps
        torch.empty(0, 3).T,
        X[0, 0].to(torch.complex64).T.conj(),
    ],
)
def test_a_tensor_lies_there_as_it_did_here(tensor: torch.Tensor) -> None:
    back = unpack(pack({"held": tensor}))["held"]
    assert back.stride() == tensor.stride() or tensor.numel() == 0
    assert torch.equal(back, tensor)
    assert back.sum(-1).tolist() == tensor.sum(-1).tolist()
    assert pack({"held": back}) == pack({"held": tensor})


@pytest.mark.parametrize(
    "tensor", [torch.ones(3).expand(4, 3), X[..., 0], torch.arange(9.0).as_strided((3, 3), (1, 1))], ids=str
)
def test_what_lies_far_apart_or_at_one_place_comes_in_one_piece(tensor: torch.Tensor) -> None:
    assert strides_of(tensor) == ()
    back = unpack(pack(tensor))
    assert back.is_contiguous()
    assert torch.equal(back, tensor)


def test_ranks_are_compared_by_their_bits() -> None:
    """A script may have laid out what it has built otherwise on one of them."""
    here, there = X[0, 0].T, X[0, 0].T.contiguous()
    assert flatten(here, TENSORS)[0] != flatten(there, TENSORS)[0]
    assert flatten(here, BITS)[0] == flatten(there, BITS)[0]


@pytest.mark.parametrize("strides", [[1 << 40, 1], [-1, 1], [1], [1.5, 1], ["a", 1], [1, 1, 1], [1, 1], [0, 1]])
def test_strides_that_nobody_has_sent_are_refused(strides: list[object]) -> None:
    payload = msgpack.encode({"T": [0, "torch.float32", [2, 2], False, strides]})
    with pytest.raises(ProtocolError):
        unpack(msgpack.encode((payload, [bytes(16)])))
