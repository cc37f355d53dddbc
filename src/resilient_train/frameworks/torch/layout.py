"""What DDP has come to by its past travels with the state: in a replica's offer, and in what a rank saves."""

from __future__ import annotations

import msgspec

from resilient_train.errors import TransferError
from resilient_train.frameworks.torch.buckets import Pass


class History(msgspec.Struct, array_like=True):
    """Of each DDP wrapper the backward passes that decided its buckets, and whether its next forward pass begins with
    rank 0's buffers: not so behind a pass without gradients or in ``no_sync``.
    """

    passes: list[list[Pass]]
    shares_buffers: list[bool]


class OfferTree(msgspec.Struct, array_like=True):
    """What travels in an Offer: the state tree, where its bytes lie, and the history of the DDP wrappers."""

    tree: bytes
    spans: list[tuple[int, int]]
    history: History


def read_offer(manifest: bytes) -> OfferTree:
    """Raises TransferError if it is none."""
    try:
        return msgspec.msgpack.decode(manifest, type=OfferTree)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the replica's offer can't be read: {error}") from None


def read_layout(layout: bytes) -> History:
    """The history alone. Raises TransferError if it is none."""
    try:
        return msgspec.msgpack.decode(layout, type=History)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the layout of DDP's buckets can't be read: {error}") from None
