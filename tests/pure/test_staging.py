"""Snapshots of state on an accelerator, and back, on a device that does everything as late, or as early, as it may."""

import mmap
import os
import threading

import pytest

torch = pytest.importorskip("torch")

from pure.fake_accelerator import DEVICE, DeviceTensor, Machine  # noqa: E402
from pure.staging_rig import STEP, TIMEOUT_S, WHOLE, LateCopier, Trained, host_image, room, trained_pair  # noqa: E402
from resilient_train._native import DIGEST_CHUNK_BYTES, Copier  # noqa: E402
from resilient_train.errors import MemoryLimitError, TransferError, VaultError  # noqa: E402
from resilient_train.frameworks.roles import Objects, SavedTree, SaveShare  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402
from resilient_train.frameworks.torch.tensors import staging  # noqa: E402
from resilient_train.frameworks.torch.tensors.staging import Staging  # noqa: E402
from resilient_train.state.checkpoint.restore_from_memory import HeldImage, fill_from  # noqa: E402
from resilient_train.state.vault.slots import image_digest  # noqa: E402

pytestmark = pytest.mark.torch

EAGER_TRAINING = {"training_is_eager": True, "side_is_eager": False}
"""Updates overtake the copies that they don't wait for."""
EAGER_COPIES = {"training_is_eager": False, "side_is_eager": True}
"""Copies overtake the updates that they don't wait for."""
LAZY = {"training_is_eager": False, "side_is_eager": False}
ORDERS = pytest.mark.parametrize("order", [EAGER_TRAINING, EAGER_COPIES, LAZY], ids=["update", "copy", "lazy"])


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", DIGEST_CHUNK_BYTES)


@ORDERS
@pytest.mark.parametrize("buffers", [2, 32])
def test_a_snapshot_is_of_the_windows_head(order: dict[str, bool], buffers: int) -> None:
    device, host = trained_pair(Machine(**order), buffers=buffers)
    expected, digests = host_image(host)
    image = device.state.image(STEP, WHOLE)
    memory = room(image)
    capture = image.begin(memory, Copier())
    device.forward()
    capture.fence()
    device.update(0.125)
    assert capture.finish() == digests
    assert bytes(memory) == expected
    assert capture.done


def test_a_rank_copies_its_own_part_only() -> None:
    machine = Machine(**EAGER_TRAINING)
    device, _ = trained_pair(machine)
    image = device.state.image(STEP, SaveShare(1, 3, 1, 3))
    copied = sum(len(part.tensor.view(-1)) for part in image.begin.args[0] if isinstance(part.tensor, DeviceTensor))
    everything = sum(value.numel() for value in device.values())
    assert 0 < copied < everything
    assert 0 < image.total_bytes < 0.4 * 4 * everything


def test_a_buffer_is_not_filled_again_before_it_is_in_the_slot() -> None:
    """The copies off the device come at once, those to the slot when somebody waits for them."""
    device, host = trained_pair(Machine(**EAGER_COPIES), buffers=2)
    image, copier = device.state.image(STEP, WHOLE), LateCopier()
    copier.go.set()
    memory = room(image)
    capture = image.begin(memory, copier)
    capture.finish()
    assert copier.waits == -(-image.total_bytes // DIGEST_CHUNK_BYTES) > 3, "more parts than buffers"
    assert bytes(memory) == host_image(host)[0]


def test_the_fence_waits_for_the_device_and_not_for_the_slot() -> None:
    machine = Machine(**EAGER_TRAINING)
    device, host = trained_pair(machine)
    expected, _ = host_image(host)
    image, copier = device.state.image(STEP, WHOLE), LateCopier()
    memory = room(image)
    capture = image.begin(memory, copier)
    capture.fence()
    device.update(0.125)
    assert not capture.done
    assert not any(memory[:100]), "nothing is in the slot yet"
    copier.go.set()
    capture.finish()
    assert bytes(memory) == expected


def test_the_training_thread_gives_the_device_nothing_and_waits_for_nothing() -> None:
    machine = Machine(**EAGER_TRAINING)
    device, _ = trained_pair(machine)
    machine.held.set()
    copier = LateCopier()
    copier.go.set()
    image = device.state.image(STEP, WHOLE)
    capture = image.begin(room(image), copier)
    assert copier.waits == 0
    fenced = threading.Thread(target=capture.fence)
    fenced.start()
    fenced.join(0.2)
    assert fenced.is_alive(), "the device is not done"
    machine.release.set()
    fenced.join(TIMEOUT_S)
    assert not fenced.is_alive()
    capture.finish()


def test_tensors_live_until_they_are_copied() -> None:
    """A copy in one piece of a turned parameter, and that of a buffer, belong to nobody else."""
    machine = Machine(**EAGER_TRAINING)
    device, host = trained_pair(machine)
    expected, _ = host_image(host)
    image = device.state.image(STEP, WHOLE)
    memory = room(image)
    machine.held.set()
    capture = image.begin(memory, Copier())
    del image
    device.optimizer.state.clear()
    for parameter in device.model.parameters():
        parameter.grad = None
    machine.release.set()
    capture.finish()
    assert bytes(memory) == expected


def test_buffers_are_kept_from_snapshot_to_snapshot() -> None:
    machine = Machine(**EAGER_TRAINING)
    device, host = trained_pair(machine, buffers=3)
    for factor in (0.125, 0.0625, 0.5):
        image = device.state.image(STEP, WHOLE)
        memory = room(image)
        capture = image.begin(memory, Copier())
        capture.fence()
        expected, _ = host_image(host)
        for each in (device, host):
            each.update(factor)
        capture.finish()
        assert bytes(memory) == expected
    assert len(machine.pinned) == 3
    assert len(machine.side) == 1


def test_a_device_that_fails_costs_the_snapshot() -> None:
    machine = Machine(**LAZY)
    device, host = trained_pair(machine)
    image = device.state.image(STEP, WHOLE)
    memory = room(image)
    machine.broken = True
    capture = image.begin(memory, Copier())
    with pytest.raises(TransferError, match="DeviceError: the device has failed"):
        capture.fence()
    with pytest.raises(TransferError, match="the one before it stays"):
        capture.finish()
    capture.abort()
    memory.release()
    machine.broken = False
    before = len(machine.pinned)
    image = device.state.image(STEP, WHOLE)
    memory = room(image)
    image.begin(memory, Copier()).finish()
    assert bytes(memory) == host_image(host)[0]
    assert len(machine.side) == 2, "the stream that failed is not used again"
    assert len(machine.pinned) > before, "nor is memory to which it may still write"


def test_an_aborted_capture_writes_no_more() -> None:
    machine = Machine(**EAGER_TRAINING)
    device, host = trained_pair(machine, buffers=2)
    image, copier = device.state.image(STEP, WHOLE), LateCopier()
    slot = mmap.mmap(-1, image.total_bytes)
    with memoryview(slot) as memory:
        capture = image.begin(memory[:], copier)
        aborting = threading.Thread(target=capture.abort)
        aborting.start()
        copier.go.set()
        aborting.join(TIMEOUT_S)
        assert not aborting.is_alive()
    slot.close()  # a BufferError while somebody holds a view of it
    assert copier.waits < 4
    image = device.state.image(STEP, WHOLE)
    memory = room(image)
    image.begin(memory, Copier()).finish()
    assert bytes(memory) == host_image(host)[0]
    assert len(machine.pinned) <= 2


def test_without_pinned_memory_nothing_is_begun() -> None:
    machine = Machine(**LAZY)
    machine.pinned_limit = 0
    device, _ = trained_pair(machine)
    image = device.state.image(STEP, WHOLE)
    slot = mmap.mmap(-1, image.total_bytes)
    with memoryview(slot) as memory, pytest.raises(MemoryLimitError, match="out of memory"):
        image.begin(memory, Copier())
    slot.close()


def test_the_pinned_memory_that_there_is_will_do() -> None:
    machine = Machine(**EAGER_TRAINING)
    machine.pinned_limit = 1
    device, host = trained_pair(machine)
    expected, _ = host_image(host)
    image = device.state.image(STEP, WHOLE)
    memory = room(image)
    capture = image.begin(memory, Copier())
    capture.fence()
    device.update(0.125)
    capture.finish()
    assert bytes(memory) == expected


def restore(into: Trained, host: Trained, *, damaged: bool = False) -> None:
    """Takes up the snapshot of ``host``."""
    image = host.state.image(STEP, WHOLE)
    memory = room(image)
    digest = image_digest(image.begin(memory, Copier()).finish())
    if damaged:
        memory[-1] ^= 1
    fd = os.memfd_create("snapshot")
    try:
        os.pwrite(fd, memory, 0)
        held = HeldImage("the snapshot", fd, 0, image.total_bytes, digest)
        into.state.load(
            lambda _: [SavedTree(image.tree, image.names)], lambda targets, _: fill_from([held], targets, Copier())
        )
    finally:
        os.close(fd)


@ORDERS
@pytest.mark.parametrize("buffers", [2, 32])
def test_a_snapshot_comes_back(order: dict[str, bool], buffers: int) -> None:
    machine = Machine(**order)
    host, device = Trained(), Trained(machine, seed=5, buffers=buffers)
    host.update(0.5)
    places = [each.detach().inner.data_ptr() for each in device.model.parameters()]
    versions = [each._version for each in device.model.buffers()]
    with torch.no_grad():
        for each in device.model.parameters():
            each.mul_(3)  # given to the device before, and perhaps not done yet
    restore(device, host)
    for mine, theirs in zip(device.model.parameters(), host.model.parameters(), strict=True):
        assert torch.equal(mine.detach().inner, theirs), "it is there, without any wait for the device"
    assert [each.detach().inner.data_ptr() for each in device.model.parameters()] == places, "DDP holds on to them"
    assert [each._version for each in device.model.buffers()] == versions, "or they count as a rank's own"
    assert_same(device, host)
    for each in (device, host):
        each.update(0.25)
    assert_same(device, host)


def assert_same(device: Trained, host: Trained) -> None:
    for mine, theirs in zip(device.values(), host.values(), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_an_optimizers_state_comes_to_its_device() -> None:
    host, device = Trained(), Trained(Machine(**LAZY))
    host.update(0.5)
    restore(device, host)
    state = device.optimizer.state[device.model.large]
    assert (state["exp_avg"].device, state["step"].device) == (DEVICE, torch.device("cpu"))
    assert device.optimizer.state[device.model.scalar]["exp_avg"].device == DEVICE
    device.optimizer.param_groups[0]["capturable"] = True  # as torch's load_state_dict: a kernel reads it
    restore(device, host)
    assert device.optimizer.state[device.model.large]["step"].device == DEVICE
    assert_same(device, host)


def test_a_damaged_snapshot_touches_nothing_on_the_device() -> None:
    host, device = Trained(), Trained(Machine(**LAZY), seed=5)
    host.update(0.5)
    before = device.values()
    with pytest.raises(VaultError, match="damaged"):
        restore(device, host, damaged=True)
    assert all(torch.equal(one, other) for one, other in zip(before, device.values(), strict=True))


def test_a_snapshot_comes_back_without_pinned_memory() -> None:
    machine = Machine(**LAZY)
    machine.pinned_limit = 0
    host, device = Trained(), Trained(machine, seed=5)
    host.update(0.5)
    restore(device, host)
    assert_same(device, host)


def test_a_job_that_stays_on_the_host_pins_nothing() -> None:
    unused = Staging(1 << 30, pinned=lambda _: pytest.fail("memory was pinned"))
    host, other = Trained(), Trained(seed=5, staging=unused)
    host.update(0.5)
    restore(other, host)
    assert_same(other, host)
    other.state.image(STEP, WHOLE).begin(room(other.state.image(STEP, WHOLE)), Copier()).finish()


def test_a_device_that_fails_while_it_is_filled_is_told() -> None:
    machine = Machine(**LAZY)
    host, device = Trained(), Trained(machine, seed=5, buffers=2)
    host.update(0.5)
    machine.broken = True
    with pytest.raises(RuntimeError, match="the device has failed"):
        restore(device, host)
    machine.broken = False
    restore(device, host)
    assert_same(device, host)


@pytest.mark.parametrize(("asked", "made"), [(0, 2), (5, 5)])
def test_the_setting_is_how_much_may_be_pinned(asked: int, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_PINNED_BYTES", str(asked * staging.BUFFER_BYTES + 1))
    assert engine_for(Objects((), ())).state._staging._most == made
