"""An accelerator that is as late as its streams allow: its tensors are real, and nothing is done before somebody waits.

``DeviceTensor`` says that it lies on a device; its bytes lie here, in a tensor that only this file touches. What an
operation would do is put into the queue of the thread's current stream. A stream that is *lazy* does it when an event
behind it is waited for; one that is *eager* does it at once, unless it waits for an event of another stream, which then
has to do its part first. A test chooses which stream is which: those are the two ends of what a device may do.

Memory whose last tensor is gone is overwritten at once, as an allocator's next user would do it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.utils import _pytree

DEVICE = torch.device("meta")
"""Of the types that torch knows without a driver, the one that has no other use here."""
RUBBISH = 0xA5
_VIEWS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.view.default,
    torch.ops.aten.view.dtype,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
}
_NEW = {torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default}


class DeviceError(RuntimeError):
    """What the device says when it has failed."""


class Stream:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.eager = False
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        """How many of all that were ever queued."""
        self.queued = 0

    def add(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.queued += 1
        if self.eager:
            self.run(self.queued)

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.queue.pop(0)()

    def wait_event(self, event: Event) -> None:
        with self.machine.lock:
            stream, at = event.stream, event.at
            self.add(lambda: stream.run(at))


class Event:
    def __init__(self, machine: Machine, **_options: Any) -> None:
        self._machine = machine
        self.stream = machine.training
        self.at = 0

    def record(self, stream: Stream) -> None:
        with self._machine.lock:
            self.stream, self.at = stream, stream.queued

    def synchronize(self) -> None:
        if self._machine.held.is_set() and self.stream is not self._machine.training:
            self._machine.release.wait(20)
        with self._machine.lock:
            if self._machine.broken:
                raise DeviceError("the device has failed")
            self.stream.run(self.at)


class Machine:
    """The device, and the module that torch has for it (``torch.cuda``)."""

    def __init__(self, *, training_is_eager: bool, side_is_eager: bool) -> None:
        self.lock = threading.RLock()
        self.training = Stream(self)
        self.training.eager = training_is_eager
        self._side_is_eager = side_is_eager
        self.side: list[Stream] = []
        self.pinned: list[torch.Tensor] = []
        self.pinned_limit = 1 << 20
        self.broken = False
        self.held = threading.Event()
        """While set, nobody gets past an event of a side stream before ``release`` is set."""
        self.release = threading.Event()
        self._local = threading.local()

    # -- the module

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802 - torch's name
        assert device == DEVICE
        self.side.append(Stream(self))
        self.side[-1].eager = self._side_is_eager
        return self.side[-1]

    def Event(self, **options: Any) -> Event:  # noqa: N802 - torch's name
        return Event(self, **options)

    def current_stream(self, _device: torch.device | None = None) -> Stream:
        return getattr(self._local, "stream", self.training)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        assert device == DEVICE
        return contextlib.nullcontext()

    # -- what a test needs

    def pin(self, size_bytes: int) -> torch.Tensor:
        if len(self.pinned) == self.pinned_limit:
            raise RuntimeError("CUDA error: out of memory")
        self.pinned.append(torch.full((size_bytes,), RUBBISH, dtype=torch.uint8))
        return self.pinned[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(each.data_ptr() == tensor.untyped_storage().data_ptr() for each in self.pinned)

    def to_device(self, tensor: torch.Tensor) -> DeviceTensor:
        return DeviceTensor(tensor.detach().clone(), self, _Memory())

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the tensor holds when all that the device was given is done."""
        with self.lock:
            for stream in [self.training, *self.side]:
                stream.run(stream.queued)
            return tensor.detach().inner.clone() if isinstance(tensor, DeviceTensor) else tensor.detach().clone()


class _Memory:
    """Lives as long as some tensor in this memory."""


class DeviceTensor(torch.Tensor):
    """A tensor of the machine's; see the module's text."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, machine: Machine, memory: _Memory) -> Self:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        tensor.inner, tensor.machine, tensor.memory = inner, machine, memory
        return tensor

    def __init__(self, inner: torch.Tensor, machine: Machine, memory: _Memory) -> None:
        if not hasattr(memory, "guarded"):
            memory.guarded = True
            weakref.finalize(memory, _overwrite, inner.untyped_storage()).atexit = False

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = {**(kwargs or {})}
        if "device" in kwargs:
            assert kwargs.pop("device") in (None, DEVICE), "only host memory is copied to and fro"
        kwargs.pop("pin_memory", None)
        machine = next(each.machine for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor))
        bare = _pytree.tree_map_only(DeviceTensor, lambda each: each.inner, (args, kwargs))
        with machine.lock:
            if func in _VIEWS:
                return cls(func(*bare[0], **bare[1]), machine, args[0].memory)
            if func in _NEW:
                return cls(func(*bare[0], **bare[1]).fill_(1), machine, _Memory())
            if func is torch.ops.aten.copy_.default:
                return _copy(machine, *args[:2], non_blocking=len(args) > 2 and args[2])
            return _compute(machine, func, args, bare)


def _copy(machine: Machine, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
    stream = machine.current_stream()
    to, of = (each.inner if isinstance(each, DeviceTensor) else each for each in (target, source))
    stream.add(lambda: to.copy_(of))
    across = not (isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor))
    host = source if isinstance(target, DeviceTensor) else target
    if across and not (non_blocking and machine.is_pinned(host)):
        stream.run(stream.queued)
    return target


def _compute(machine: Machine, func: Any, args: Any, bare: Any) -> Any:
    """Any other operation: in place into its first argument, or into new memory."""
    arguments, options = bare
    if func._schema.is_mutable:
        assert func._schema.name.endswith("_"), func
        machine.current_stream().add(lambda: func(*arguments, **options))
        return args[0]
    shape = func(*arguments, **options)
    result = torch.full_like(shape, 1)
    machine.current_stream().add(lambda: result.copy_(func(*arguments, **options)))
    return DeviceTensor(result, machine, _Memory())


def _overwrite(storage: torch.UntypedStorage) -> None:
    storage.fill_(RUBBISH)
