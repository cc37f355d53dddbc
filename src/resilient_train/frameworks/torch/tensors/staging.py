"""State on an accelerator, to the host and back, beside the training: by a stream of its own, through pinned memory.

A snapshot takes three steps, each behind the one before::

    the training's stream   all that the device was given before the window       -> an event, for which ours waits
    our stream              device -> pinned buffers, 32 MiB each                 -> an event for each buffer
    a thread                waits for that event; buffer -> slot, hashed on the way; then the buffer is free

The training thread waits for the events only (``fence``). With fewer buffers than the snapshot has parts it also waits
for the slot: the last part needs a buffer that has been emptied. Why it is built like this: decision 23.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from resilient_train._native import DIGEST_CHUNK_BYTES, Copier
from resilient_train.errors import MemoryLimitError, TransferError
from resilient_train.frameworks.torch.tensors.leaves import span_of
from resilient_train.state.capture import HostCapture

BUFFER_BYTES = 8 * DIGEST_CHUNK_BYTES
"""Whole chunks of the image's digest, so that each buffer is hashed by itself."""
_Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""(target, source), bytes each."""
_Events = dict[torch.device, Any]


def on_host(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in this process's memory."""
    return tensor.device.type == "cpu"


class TensorPart(NamedTuple):
    """``size`` bytes of a dense tensor, behind its first ``skipped`` ones; they follow those of the part before."""

    tensor: torch.Tensor
    skipped: int
    size: int


class Lane:
    """A stream of one device beside the one that it computes on. ``module`` is ``torch.cuda``, or a likeness of it."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module
        self._stream = module.Stream(device=device)

    def follow(self) -> None:
        """What comes here from now on waits, on the device, for all that the calling thread has given it so far."""
        given = self._module.Event()
        given.record(self._module.current_stream(self._device))
        self._stream.wait_event(given)

    def copy(self, copies: _Copies) -> Any:
        """Begins copies between the device and pinned memory. Returns an event: until it has come, the caller keeps the
        tensors alive and the sources as they are.
        """
        with self._module.device(self._device), self._module.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        done = self._module.Event(blocking=True)
        done.record(self._stream)
        return done


def _wait(events: _Events) -> None:
    for event in events.values():
        event.synchronize()


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Staging:
    """Pinned buffers, made when they are needed, and kept; and a lane for each device. One copy at a time.

    ``module_of`` and ``pinned`` are what this asks of torch.
    """

    def __init__(
        self,
        limit_bytes: int,
        module_of: Callable[[torch.device], Any] = torch.get_device_module,
        pinned: Callable[[int], torch.Tensor] = _pinned,
    ) -> None:
        self._most = max(2, limit_bytes // BUFFER_BYTES)
        self._module_of = module_of
        self._pinned = pinned
        self._made = 0
        self._free: list[torch.Tensor] = []
        self._lanes: dict[torch.device, Lane] = {}

    def capture(self, parts: Sequence[TensorPart], memory: memoryview, copier: Copier) -> StagedCapture:
        """Begins to copy the parts, one behind the other, into ``memory``, which they fill.

        What the calling thread has given the devices before is in them; host memory among the parts is copied before
        ``fence`` returns, too. Raises MemoryLimitError if there is no pinned memory to be had.
        """
        self._follow(part.tensor for part in parts)
        self._free.append(self._take())  # with one it can be done
        return StagedCapture(self, parts, memory, copier)

    def upload(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fills tensors from host memory, (tensor on a device, dense tensor of its dtype and shape); returns when it is
        there. Raises what the device raises.
        """
        if not pairs:  # nothing is pinned in a job that stays on the host: it would set up the driver
            return
        self._follow(target for target, _ in pairs)
        try:
            self._free.append(self._take())
        except MemoryLimitError:  # the driver has pinned memory of its own, and takes longer
            for target, source in pairs:
                target.data.copy_(source)
            return
        try:
            self._upload(pairs)
        except RuntimeError:
            self.forget()
            raise

    def _upload(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        # Not `detach()`: its writes count as the tensor's, and a buffer that was written to is taken for a rank's own.
        targets = _windows(_bytes(target.data) for target, _ in pairs)
        sources = _windows(_bytes(source) for _, source in pairs)
        flights: deque[tuple[torch.Tensor, _Events]] = deque()
        for wanted, held in zip(targets, sources, strict=True):
            buffer = self.spare()
            while buffer is None:
                buffer, events = flights.popleft()
                _wait(events)
            for at, source in held:
                buffer[at : at + len(source)].copy_(source)
            copies = [(target, buffer[at : at + len(target)]) for at, target in wanted]
            flights.append((buffer, self.begin(copies)))
        for buffer, events in flights:
            _wait(events)
            self.give_back(buffer)

    def begin(self, copies: _Copies) -> _Events:
        """Begins copies between host and devices; those within the host are over. Returns the devices' events."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in copies:
            far = source if on_host(target) else target
            if on_host(far):
                target.copy_(source)
            else:
                by_device.setdefault(far.device, []).append((target, source))
        return {device: self._lanes[device].copy(some) for device, some in by_device.items()}

    def spare(self) -> torch.Tensor | None:
        """A buffer that nothing is copied to or from. None: all that there may be are in use."""
        if not self._free and self._made == self._most:
            return None
        try:
            return self._take()
        except MemoryLimitError:
            self._most = self._made  # those that there are will do
            return None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nothing is copied to or from the buffer any more."""
        self._free.append(buffer)

    def forget(self) -> None:
        """A device failed: what it may still write to, and the streams, are not used again."""
        self._made = 0
        self._free.clear()
        self._lanes.clear()

    def _take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        try:
            buffer = self._pinned(BUFFER_BYTES)
        except RuntimeError as error:
            raise MemoryLimitError(
                f"{BUFFER_BYTES} bytes of host memory could not be pinned, and snapshots of a device go through such: "
                f"{error}"
            ) from error
        self._made += 1
        return buffer

    def _follow(self, tensors: Iterable[torch.Tensor]) -> None:
        for device in {tensor.device for tensor in tensors if not on_host(tensor)}:
            if device not in self._lanes:
                self._lanes[device] = Lane(device, self._module_of(device))
            self._lanes[device].follow()


class _Flight(NamedTuple):
    """A part of the image on its way to the host."""

    buffer: torch.Tensor
    size: int
    events: _Events


class StagedCapture:
    """See ``state/capture.Capture``. Made by ``Staging.capture``."""

    def __init__(self, staging: Staging, parts: Sequence[TensorPart], memory: memoryview, copier: Copier) -> None:
        self._staging = staging
        self._parts = parts
        self._memory = memory[:]  # let go of at the end, whoever still knows of this object
        self._copier = copier
        self._last: _Events = {}
        self._digests: list[bytes] = []
        self._given = threading.Event()
        """All copies off the devices were begun, or there will be no more."""
        self._aborted = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="rt-capture", daemon=True)
        self._thread.start()

    def fence(self) -> None:
        self._given.wait()
        self._raise_failure()
        try:
            _wait(self._last)
        except RuntimeError as error:
            raise _failed(error) from error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> bytes:
        self._thread.join()
        self._raise_failure()
        return b"".join(self._digests)

    def abort(self) -> None:
        self._aborted = True
        self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise _failed(self._failure) from self._failure

    def _run(self) -> None:
        try:
            self._copy()
        except Exception as error:  # told by ``fence`` or ``finish``, in the training thread
            self._failure = error
            self._staging.forget()
        finally:
            self._memory.release()
            self._parts = ()
            self._given.set()

    def _copy(self) -> None:
        flights: deque[_Flight] = deque()
        windows = _windows(_bytes(part.tensor).narrow(0, part.skipped, part.size) for part in self._parts)
        for window in windows:
            while (buffer := self._staging.spare()) is None:
                self._land(flights.popleft())
            if self._aborted:
                self._staging.give_back(buffer)
                break
            events = self._staging.begin((buffer[at : at + len(source)], source) for at, source in window)
            self._last.update(events)
            at, source = window[-1]
            flights.append(_Flight(buffer, at + len(source), events))
        self._given.set()
        while flights:
            self._land(flights.popleft())

    def _land(self, flight: _Flight) -> None:
        """From the buffer to the slot."""
        _wait(flight.events)
        if not self._aborted:
            start = len(self._digests) * BUFFER_BYTES
            address = span_of(flight.buffer).address
            with self._memory[start : start + flight.size] as memory:
                copy = HostCapture([(address, flight.size, 0)], flight.buffer, memory, self._copier)
                self._digests.append(copy.finish())
        self._staging.give_back(flight.buffer)


def _failed(error: Exception) -> TransferError:
    return TransferError(
        f"the state could not be copied off the device ({type(error).__name__}: {error}); this snapshot is given up, "
        "the one before it stays"
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as bytes, not copied."""
    return tensor.view(-1).view(torch.uint8)


def _windows(sources: Iterable[torch.Tensor]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Bytes that follow each other, cut where a buffer is full: (offset in the buffer, bytes)."""
    window: list[tuple[int, torch.Tensor]] = []
    at = 0
    for source in sources:
        taken = 0
        while taken < len(source):
            size = min(len(source) - taken, BUFFER_BYTES - at)
            window.append((at, source.narrow(0, taken, size)))
            taken += size
            at += size
            if at == BUFFER_BYTES:
                yield window
                window, at = [], 0
    if window:
        yield window
