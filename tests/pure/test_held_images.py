"""Tensors out of snapshots in memory: whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pure.checkpoint_rig import CUT, NAMES, NUMPY, WHOLE, image, pieces, value, whole
from resilient_train._native import Copier
from resilient_train.errors import ConfigError, VaultError
from resilient_train.state.checkpoint.restore_from_memory import HeldImage, fill_from
from resilient_train.state.checkpoint.target import BlockTarget
from resilient_train.state.digest import chunk_digests
from resilient_train.state.image import plan_image
from resilient_train.state.vault.slots import image_digest

STEP = 5
Shares = Callable[[int, int], HeldImage]
START = 4096
"""Of the image in its memfd: a slot does not begin with it."""


@pytest.fixture
def held() -> Iterator[Shares]:
    """Makes the share of a shard."""
    opened = []

    def make(shard: int, shards: int) -> HeldImage:
        plan = plan_image(pieces(shard, shards), shard, shards)
        memory = image(plan, STEP)[: plan.total_bytes]
        opened.append(os.memfd_create("held"))
        os.pwrite(opened[-1], memory, START)
        digest = image_digest(b"".join(chunk_digests(memory)))
        return HeldImage(f"share {shard}", opened[-1], START, plan.total_bytes, digest)

    yield make
    for fd in opened:
        os.close(fd)


def arrays() -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, NUMPY[dtype]) for name, (dtype, shape) in (CUT | WHOLE).items()}


def targets(into: dict[str, np.ndarray]) -> list[BlockTarget]:
    return [
        BlockTarget(
            whole(name, *(CUT | WHOLE)[name]),
            memoryview(array.reshape(-1)).cast("B") if array.size else memoryview(b""),
        )
        for name, array in into.items()
    ]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shares_make_the_whole(shards: int, held: Shares) -> None:
    into = arrays()
    copied = fill_from([held(shard, shards) for shard in range(shards)], targets(into), Copier())
    assert copied == sum(array.nbytes for array in into.values())
    for name in NAMES:
        np.testing.assert_array_equal(into[name], value(name, STEP))


@pytest.mark.parametrize(
    "shares",
    [
        [(0, 3), (2, 3)],
        # What survivors saved at a job's end was divided by two, the other ranks' snapshots of that update by four.
        [(0, 4), (1, 4), (0, 2), (3, 4)],
    ],
)
def test_shares_of_different_wholes_are_refused(shares: list[tuple[int, int]], held: Shares) -> None:
    into = arrays()
    with pytest.raises(VaultError, match="whole"):
        fill_from([held(*share) for share in shares], targets(into), Copier())
    assert not any(array.any() for array in into.values())


def test_a_damaged_share_is_refused(held: Shares) -> None:
    share = held(1, 2)
    at = share.start + share.size_bytes - 1
    os.pwrite(share.fd, bytes([os.pread(share.fd, 1, at)[0] ^ 1]), at)
    with pytest.raises(VaultError, match="share 1 is damaged"):
        fill_from([held(0, 2), share], targets(arrays()), Copier())


def test_a_share_that_is_cut_off_is_refused(held: Shares) -> None:
    share = held(1, 2)
    os.ftruncate(share.fd, share.start + share.size_bytes - 1)
    with pytest.raises(VaultError, match="share 1 can't be read"):
        fill_from([held(0, 2), share], targets(arrays()), Copier())


def test_another_models_tensor_is_refused(held: Shares) -> None:
    wanted = [BlockTarget(whole("model.9.weight", "F32", (1,)), memoryview(bytearray(4)))]
    with pytest.raises(ConfigError, match=r"model\.9\.weight"):
        fill_from([held(0, 1)], wanted, Copier())
