"""The way of state on a real accelerator into a slot and back: a snapshot beside a training step, bit for bit.

Nothing stands in for anything here: an NVIDIA GPU or an Ascend NPU (with torch_npu installed). Where there is none the
same is done on the host, so that this file is known to work when a device comes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from resilient_train._native import DIGEST_CHUNK_BYTES, Copier  # noqa: E402
from resilient_train.errors import VaultError  # noqa: E402
from resilient_train.frameworks.accelerator import Host  # noqa: E402
from resilient_train.frameworks.roles import Image, Objects, SavedTree, SaveShare  # noqa: E402
from resilient_train.frameworks.torch.rank_state import TorchRankState  # noqa: E402
from resilient_train.frameworks.torch.state import TorchState  # noqa: E402
from resilient_train.frameworks.torch.tensors.staging import BUFFER_BYTES, Staging  # noqa: E402
from resilient_train.state.checkpoint.restore_from_memory import HeldImage, fill_from  # noqa: E402
from resilient_train.state.vault.slots import SlotPair, create, image_digest  # noqa: E402

pytestmark = pytest.mark.torch
WHOLE = SaveShare(0, 1, 0, 1)
THERE = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if THERE else torch.device("cpu")
WIDTH = 1536 if THERE else 128


class Job:
    """On a device a model of 28 million parameters: with AdamW's moments ten buffers and a piece."""

    def __init__(self, seed: int, staging: Staging, *, fused: bool) -> None:
        torch.manual_seed(seed)
        self.device = DEVICE
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()]
        layers += [each for _ in range(11) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused)
        objects = Objects((self.model,), (self.optimizer,))
        self.state = TorchState(objects, TorchRankState(objects.models, {}), Host(), staging)
        self.draw = torch.Generator().manual_seed(seed)

    def forward_backward(self) -> None:
        batch = torch.randn(64, WIDTH, generator=self.draw).to(self.device)
        self.model(batch).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        """All of the state, on the host."""
        return [each.detach().cpu().clone() for each in self.state.tensors().values()]


@pytest.fixture
def pair() -> Iterator[SlotPair]:
    pair = SlotPair(create(0, 512 << 20), writes=True)
    yield pair
    pair.close()


def load(job: Job, image: Image, memory: memoryview, digests: bytes) -> None:
    fd = os.memfd_create("snapshot")
    try:
        os.pwrite(fd, memory, 0)
        held = HeldImage("the snapshot", fd, 0, image.total_bytes, image_digest(digests))
        job.state.load(
            lambda _: [SavedTree(image.tree, image.names)], lambda targets, _: fill_from([held], targets, Copier())
        )
    finally:
        os.close(fd)


def assert_equal(job: Job, expected: list[torch.Tensor]) -> None:
    values = job.values()
    assert len(values) == len(expected)
    for mine, theirs in zip(values, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("limit_bytes", [2 * BUFFER_BYTES, 1 << 30])
def test_a_snapshot_beside_a_training_step(pair: SlotPair, limit_bytes: int, *, fused: bool) -> None:
    staging = Staging(limit_bytes)
    job = Job(1, staging, fused=fused)
    for _ in range(2):
        job.forward_backward()
        job.update()
    for commits in range(4):  # from the second on the pinned memory is used again
        expected = job.values() if commits % 2 else None
        draft = pair.begin()
        assert draft is not None
        image = job.state.image(commits, WHOLE)
        memory = draft.image[: image.total_bytes]
        capture = image.begin(memory, Copier())
        if expected is None:  # nothing has waited for the device: the copies have to
            expected = job.values()
        job.forward_backward()
        capture.fence()
        job.update()
        digests = capture.finish()
        assert len(digests) == 16 * -(-image.total_bytes // DIGEST_CHUNK_BYTES)
        other = Job(2, staging, fused=fused)
        other.forward_backward()
        other.update()
        load(other, image, memory, digests)
        assert_equal(other, expected)
        memory.release()
        draft.abandon()
        for each in (job, other):
            each.draw.manual_seed(commits)
        load_present(job, other)
        for each in (job, other):
            each.forward_backward()
            each.update()
        assert_equal(other, job.values())


def load_present(job: Job, other: Job) -> None:
    """``other`` takes up what ``job`` is now."""
    image = job.state.image(0, WHOLE)
    memory = memoryview(mmap.mmap(-1, image.total_bytes))
    load(other, image, memory, image.begin(memory, Copier()).finish())


@pytest.mark.skipif(not THERE, reason="on the host a snapshot is verified as it is copied into place")
def test_a_damaged_snapshot_touches_nothing() -> None:
    staging = Staging(1 << 30)
    job, other = Job(1, staging, fused=False), Job(2, staging, fused=False)
    job.forward_backward()
    job.update()
    before = other.values()
    image = job.state.image(0, WHOLE)
    memory = memoryview(mmap.mmap(-1, image.total_bytes))
    digests = image.begin(memory, Copier()).finish()
    memory[-1] ^= 1
    with pytest.raises(VaultError, match="damaged"):
        load(other, image, memory, digests)
    assert_equal(other, before)
