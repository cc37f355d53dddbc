"""How DDP's buckets came to lie travels with the state: in a replica's offer, and in what a rank saves."""

from __future__ import annotations

import msgspec

from resilient_train.errors import TransferError
from resilient_train.frameworks.torch.buckets import Pass


class OfferTree(msgspec.Struct, array_like=True):
    """What travels in an Offer: the state tree, where its bytes lie, and the passes that decided DDP's buckets."""

    tree: bytes
    spans: list[tuple[int, int]]
    passes: list[list[Pass]]


def read_offer(manifest: bytes) -> OfferTree:
    """Raises TransferError if it is none."""
    try:
        return msgspec.msgpack.decode(manifest, type=OfferTree)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the replica's offer can't be read: {error}") from None


def read_layout(layout: bytes) -> list[list[Pass]]:
    """The passes alone. Raises TransferError if they are none."""
    try:
        return msgspec.msgpack.decode(layout, type=list[list[Pass]])
    except msgspec.MsgspecError as error:
        raise TransferError(f"the layout of DDP's buckets can't be read: {error}") from None
