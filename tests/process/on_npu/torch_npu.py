"""A torch_npu without an NPU: tensors lie on the CPU, collectives go over gloo, and a device is a little state.

With ``NPU_MEMORY`` (the library that ``protected_memory.cpp`` becomes) tensors may lie on an ``npu``, whose memory the
host can neither read nor write.

What a recovery calls has the signatures of the real wheel (``npu_signatures.json``) and does what the wheel's Python
does with the groups of ``_pg_map``. What the device does is told by its documentation: a stopped one fails whoever
waits for it with FORCE STOP, and runs nothing until it is restarted; HCCL notices no dead peer; a thread that waits in
it is reached by no signal.

Each call of such a function is a line of ``RUN/npu_RANK_INCARNATION.jsonl``. ``fail_next`` has the next collective of
this process fail as a device would.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_generator
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pure.npu_signatures import signature
from resilient_train.config import read_link
from resilient_train.frameworks.torch.communication.address_store import AddressStore, FirstAddresses
from resilient_train.frameworks.torch.communication.collective_results import POINT_TO_POINT, VERBS, done
from resilient_train.frameworks.torch.communication.process_group import drop
from resilient_train.frameworks.torch.communication.transports import gloo

__version__ = "2.13.0"
TAIL = "\n[ERROR] 2026-08-21-10:12:09 (PID:1, Device:0, RankID:0) ERR00100 PTA call acl api failed"
FORCE_STOP = f"NPU function error: FORCE STOP, error code is 107022{TAIL}"
UCE = f"NPU function error: UCE ERROR, error code is 507053{TAIL}"
RETRY_FAILED = f"NPU function error: HCCL OP RETRY FAILED, error code is 507904{TAIL}"
TIMEOUT = timedelta(seconds=60)

torch.utils.rename_privateuse1_backend("npu")
NPU = torch.device("npu")
MEMORY = os.environ.get("NPU_MEMORY", "")


class Stream:
    """All is done when it is called."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _module() -> SimpleNamespace:
    """What torch asks of ``torch.npu`` by that name."""
    if not MEMORY:
        return SimpleNamespace(is_available=lambda: False)  # no tensor can lie there
    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda _: None,
        synchronize=lambda device=None: None,
        manual_seed_all=torch.ops.protected_memory.seed,
        _is_in_bad_fork=lambda: False,
        get_rng_state=lambda device=None: _get_rng_state(),
        set_rng_state=lambda state, device=None: _set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        Stream=Stream,
        Event=Event,
        current_stream=lambda device=None: Stream(),
        stream=lambda _: contextlib.nullcontext(),
        device=lambda _: contextlib.nullcontext(),
    )


def _get_rng_state() -> torch.Tensor:
    return torch.ops.protected_memory.get_rng_state() if MEMORY else device_generator.generator.get_state()


def _set_rng_state(state: torch.Tensor) -> None:
    (torch.ops.protected_memory.set_rng_state if MEMORY else device_generator.generator.set_state)(state)


if MEMORY:
    torch.ops.load_library(MEMORY)
torch._register_device_module("npu", _module())


class Device:
    """``lock``: between the thread that waits, the one that computes, and the one that stops."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stopped = False
        self.failure = ""
        self.damaged: torch.Tensor | None = None
        self.unsafe: set[int] = set()
        self.under_way: list[torch.futures.Future[None]] = []

    def run(self, operation: Callable[[], None]) -> None:
        """Has the device do something, and waits for it as a stream is waited for: in C++, deaf to signals."""
        outcome: torch.futures.Future[None] = torch.futures.Future()
        with self.lock:
            if self.stopped:
                raise RuntimeError(FORCE_STOP)
            failure, self.failure = self.failure, ""
            if failure:
                raise RuntimeError(failure)
            self.under_way.append(outcome)

        def compute() -> None:
            with contextlib.suppress(RuntimeError):  # a peer is gone: HCCL does not notice
                operation()
                self._settle(outcome, "")

        threading.Thread(target=compute, name="npu", daemon=True).start()
        outcome.wait()

    def _settle(self, outcome: torch.futures.Future[None], error: str) -> None:
        with self.lock:
            if outcome in self.under_way:
                self.under_way.remove(outcome)
                outcome.set_exception(RuntimeError(error)) if error else outcome.set_result(None)

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            waiting = list(self.under_way)
        for each in waiting:
            self._settle(each, FORCE_STOP)


device = Device()
epoch: Callable[[], int] = int
"""Which time connections are made: the members of a communicator that was resumed find each other by it."""


def fail_next(error: str, damaged: torch.Tensor | None = None) -> None:
    """The next collective raises this. ``damaged``: this memory has lost its content, and the device knows."""
    if damaged is not None:
        if MEMORY:
            damaged.view(torch.uint8).fill_(0xFF)
        else:
            ctypes.memset(damaged.data_ptr(), 0xFF, damaged.nbytes)
        device.damaged = damaged
    device.failure = error


class ProcessGroupHCCL(dist.ProcessGroup):
    """A group and its backend in one, which torch allows. Its connections are made with its first collective."""

    def __init__(self, store: Any, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._given, self._member, self._members, self._named = store, rank, size, name
        self._link: Any = None
        self._sockets: list[gloo.Socket] = []
        self._aborted = False

    def _get_backend(self, _: torch.device) -> ProcessGroupHCCL:
        return self

    def connect(self) -> Any:
        assert not self._aborted, "a communicator is used that was aborted"
        if self._link is None:
            book = gloo.AddressBook()
            addresses = FirstAddresses(PrefixStore(f"link{epoch()}", self._given), 0)
            store = AddressStore(addresses, self._named, range(self._members), book.note)
            self._link, self._sockets = gloo.create(store, book, self._member, self._members, TIMEOUT)
        return self._link

    def unlink(self) -> None:
        """What was half-way is lost with the connections."""
        for descriptor, inode in self._sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if gloo.inode(connection.fileno()) == inode:
                    connection.shutdown(socket.SHUT_RDWR)
        held, self._link, self._sockets = [self._link], None, []
        drop(held)

    # -- what torch_npu's own Python, and we, call of a backend

    def set_watchdog_status(self, status: int) -> None:
        assert status == (2 if device.stopped else 1)

    def clear_workmeta_list(self) -> None:
        assert not device.stopped

    def resume_hccl_comm(self, _device_id: int) -> None:
        self.unlink()

    def _delete_tcpstore_key(self) -> None:
        assert not device.stopped

    def abort_hccl_comm(self, reason: str) -> None:
        assert reason == "reinit"
        self.unlink()
        self._aborted = True

    def get_hccl_comm_name(self, _rankid: int, init_comm: bool = True) -> str:
        assert not init_comm
        return "made" if self._link is not None else ""

    def get_hccl_comm(self, _rankid: int) -> int:
        return id(self)


def _each_on_npu(tree: Any, replaced: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        with torch.no_grad():
            return replaced(tree) if tree.device.type == "npu" else tree
    return type(tree)(_each_on_npu(each, replaced) for each in tree) if isinstance(tree, (list, tuple)) else tree


def _verb(verb: str) -> Callable[..., dist.Work]:
    def call(self: ProcessGroupHCCL, *args: Any) -> dist.Work:
        there: dict[int, torch.Tensor] = {}
        moved = _each_on_npu(args, lambda tensor: there.setdefault(id(tensor), tensor.cpu()))

        def compute() -> None:
            getattr(self.connect(), verb)(*moved).wait()
            _each_on_npu(args, lambda tensor: tensor.copy_(there[id(tensor)]))

        device.run(compute)
        return done(args[0] if args else [])

    return call


for _name in (*VERBS, *POINT_TO_POINT):
    setattr(ProcessGroupHCCL, _name, _verb(_name))


# -- the functions


def _groups() -> list[Any]:
    return [each for each in dist.distributed_c10d._pg_map if NPU in each._device_types]


def _stop_device(device_id: int) -> int:
    device.stop()
    for each in _groups():
        each._get_backend(NPU).set_watchdog_status(2)
    return 0


def _check_uce_in_memory(device_id: int) -> int:
    assert device.stopped, "asked while the device computes"
    if device.damaged is None:
        return 0
    device.unsafe.add(device.damaged.untyped_storage().data_ptr())
    return 3


def _restart_device(device_id: int) -> None:
    device.damaged = None  # repaired, and forgotten
    device.stopped = False
    for each in _groups():
        each._get_backend(NPU).clear_workmeta_list()
        each._get_backend(NPU).set_watchdog_status(1)


def _update_npu_tensor_to_safe(tensor_obj: torch.Tensor) -> None:
    device.unsafe.discard(tensor_obj.untyped_storage().data_ptr())


def _reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
    if not rebuild_link:
        for each in _groups():
            each._get_backend(NPU).resume_hccl_comm(0)
        return None
    group = group or dist.distributed_c10d._world.default_pg
    if "hccl" in dist.distributed_c10d._world.pg_map[group][0]:
        group._get_backend(NPU)._delete_tcpstore_key()
        group._get_backend(NPU).abort_hccl_comm("reinit")
    return group


@functools.cache
def _journal() -> int:
    """Written at once: the process may be killed. Not opened while this is imported, which may be before a fork."""
    link = read_link()
    assert link is not None
    path = Path(link.run_dir) / f"npu_{link.rank}_{link.incarnation}.jsonl"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _told(name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    """``verb``, with the wheel's signature, which writes down that it was called."""
    takes = signature(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = takes.bind(*args, **kwargs).arguments
        plain = {key: value for key, value in bound.items() if isinstance(value, (int, type(None)))}
        freed = threading.current_thread() is not threading.main_thread()
        os.write(_journal(), json.dumps([name.rpartition(".")[2], plain, freed]).encode() + b"\n")
        return verb(**bound)

    return call


def _checked(name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    """``verb``, with the wheel's signature."""
    takes = signature(name)
    return lambda *args, **kwargs: verb(**takes.bind(*args, **kwargs).arguments)


npu = SimpleNamespace(
    is_initialized=lambda: True,
    current_device=lambda: 0,
    set_device=_told("npu.set_device", lambda device: None),
    synchronize=_told("npu.synchronize", lambda device=None: globals()["device"].run(lambda: None)),
    stop_device=_told("npu.stop_device", _stop_device),
    check_uce_in_memory=_told("npu.check_uce_in_memory", _check_uce_in_memory),
    restart_device=_told("npu.restart_device", _restart_device),
    _recovery=SimpleNamespace(
        update_npu_tensor_to_safe=_told("npu._recovery.update_npu_tensor_to_safe", _update_npu_tensor_to_safe)
    ),
)
npu.get_rng_state = _checked("npu.get_rng_state", lambda device="npu": _get_rng_state())
npu.set_rng_state = _checked("npu.set_rng_state", lambda new_state, device="npu": _set_rng_state(new_state))
distributed = SimpleNamespace(reinit_process_group=_told("distributed.reinit_process_group", _reinit_process_group))


def _create(options: Any, _: Any) -> ProcessGroupHCCL:
    return ProcessGroupHCCL(options.store, options.group_rank, options.group_size, str(options.group_id))


dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])
