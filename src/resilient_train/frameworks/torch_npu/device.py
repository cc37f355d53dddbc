"""torch_npu's verbs of a recovery, in the order of decision 14.

::

    RUNNING --stop--> STOPPED --check--> CHECKED --restart--> RUNNING --mark_safe--> RUNNING

A verb out of order is our own mistake, and an assertion. A verb that fails, or answers what it should not, is a
DeviceError: the state of the device is not known any more, so nothing is tried again.
"""

from __future__ import annotations

import enum
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from resilient_train.errors import ConfigError, DeviceError
from resilient_train.frameworks.torch_npu.errors import kind_of

NPU = "npu"
"""``device.type`` of the tensors that torch_npu marks."""


class Memory(enum.IntEnum):
    """The answers of ``check_uce_in_memory``."""

    INTACT = 0
    FOREIGN = 1
    """Memory was hit that torch_npu's allocator does not own."""
    TEMPORARY = 2
    """Only memory was hit that no tensor held; it has been given back to the device."""
    PERSISTENT = 3
    """A tensor's memory was hit, and is marked; or several bits flipped at an address that is not known."""


class RecoveryStage(enum.Enum):
    """How far this rank has come in a recovery."""

    RUNNING = enum.auto()
    STOPPED = enum.auto()
    CHECKED = enum.auto()


class NpuDevice:
    """The NPU that is current in the thread that makes this object. See ``accelerator.Accelerator``.

    ``module`` is torch_npu, as ``sys.modules`` has it. Raises ConfigError if that torch_npu lacks one of the verbs.
    """

    repairs_memory = True

    def __init__(self, module: Any, rank: int) -> None:
        self._rank = rank
        self._synchronize = _find(module, "npu.synchronize")
        self._stop_device = _find(module, "npu.stop_device")
        self._check_uce_in_memory = _find(module, "npu.check_uce_in_memory")
        self._restart_device = _find(module, "npu.restart_device")
        self._update_tensor = _find(module, "npu._recovery.update_npu_tensor_to_safe")
        self._reinit_process_group = _find(module, "distributed.reinit_process_group")
        self._get_rng_state = _find(module, "npu.get_rng_state")
        self._set_rng_state = _find(module, "npu.set_rng_state")
        self._index = int(_find(module, "npu.current_device")())
        self._set_device = _find(module, "npu.set_device")
        self._state = RecoveryStage.RUNNING
        self._marked = False
        self._lent = False
        self._between = threading.Lock()
        """Nobody stops the device while the training thread takes it back, and the other way round."""

    @property
    def stopped(self) -> bool:
        return self._state is not RecoveryStage.RUNNING

    def lend(self) -> None:
        self._lent = True

    def cut(self) -> int:
        with self._between:
            if not self._lent or self.stopped:
                return 0
            self._set_device(self._index)  # the current device is a thread's own
            self._stop()
            return 1

    def take_back(self) -> None:
        with self._between:
            self._lent = False
        if self.stopped:
            self.check(reported=False)
            self.restart((), replaced=False)

    def synchronize(self) -> None:
        self._synchronize(self._index)
        with self._between:
            self._lent = False
        if self.stopped:
            raise RuntimeError(f"FORCE STOP: NPU {self._index} was stopped while rank {self._rank} waited for it")

    def kind_of(self, error: BaseException) -> str:
        return kind_of(str(error)) if isinstance(error, RuntimeError) else ""

    def stop(self) -> None:
        with self._between:  # who was freed may come here before the thread that frees has seen the answer
            self._stop()

    def _stop(self) -> None:
        self._lent = False
        if self._state is not RecoveryStage.RUNNING:
            return  # a newer recovery began before the device was restarted
        answer = self._call("stop_device", self._stop_device, self._index)
        if answer != 0:
            raise self._error(f"stop_device({self._index}) answered {answer!r}: its tasks were not aborted")
        self._state = RecoveryStage.STOPPED

    def check(self, *, reported: bool) -> bool:
        assert self._state is not RecoveryStage.RUNNING, "check_uce_in_memory before stop_device"
        answer = self._call("check_uce_in_memory", self._check_uce_in_memory, self._index)
        if answer not in tuple(Memory):
            raise self._error(f"check_uce_in_memory({self._index}) answered {answer!r}, which has no meaning")
        if answer == Memory.FOREIGN:
            raise self._error("memory has lost data that is not torch_npu's, and cannot be repaired")
        if answer == Memory.INTACT and reported:
            raise self._error("the device has reported damaged addresses of which torch_npu does not know")
        self._marked = self._marked or answer == Memory.PERSISTENT
        self._state = RecoveryStage.CHECKED
        return self._marked

    def restart(self, groups: Sequence[Any], *, replaced: bool) -> None:
        assert self._state is RecoveryStage.CHECKED, "restart_device before check_uce_in_memory"
        if replaced:
            self._restart()
            for group in (None, *groups):
                self._reinit(group, rebuild_link=True)
        else:
            # Communicators first: the restart also wakes torch_npu's watchdog, which must not find them suspended.
            self._reinit(None, rebuild_link=False)
            self._restart()
        self._state = RecoveryStage.RUNNING

    def random_state(self) -> Any:
        return self._get_rng_state(self._index)  # a seed and an offset, which torch_npu keeps on the host

    def restore_random_state(self, state: Any) -> None:
        self._set_rng_state(state, self._index)

    def mark_safe(self, tensors: Iterable[Any]) -> None:
        assert self._state is RecoveryStage.RUNNING, "update_npu_tensor_to_safe before restart_device"
        if not self._marked:
            return
        for tensor in tensors:
            if tensor.device.type == NPU:
                self._call("update_npu_tensor_to_safe", self._update_tensor, tensor)
        self._marked = False

    def _restart(self) -> None:
        answer = self._call("restart_device", self._restart_device, self._index)
        if answer is not None:
            raise self._error(f"restart_device({self._index}) answered {answer!r} instead of None")

    def _reinit(self, group: Any, *, rebuild_link: bool) -> None:
        self._call("reinit_process_group", self._reinit_process_group, group=group, rebuild_link=rebuild_link)

    def _call(self, name: str, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        except Exception as error:
            raise self._error(f"{name} failed: {type(error).__name__}: {error}") from error

    def _error(self, what: str) -> DeviceError:
        return DeviceError(
            f"rank {self._rank}, NPU {self._index}: {what}; this process cannot go on, and ends so that it is replaced"
        )


def _find(module: Any, name: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = operator.attrgetter(name)(module)
    except AttributeError:
        version = getattr(module, "__version__", "of unknown version")
        raise ConfigError(
            f"torch_npu {version} has no {name}, without which a fault cannot be recovered from in process; 2.13 has it"
        ) from None
    return found
