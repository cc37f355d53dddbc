"""A device without a device: tells the look-alikes of libhccl, libascendcl, libnccl and libnvidia-ml what to answer.

They are loaded by name, as the vendors' would be, and read a file of shared memory that the variable
``RESILIENT_FAKE_DEVICE`` names at their first call; the layout is that of ``csrc/fake/control.hpp``. Only development
installs have them (``make setup``)::

    device = FakeDevice.create(path)
    os.environ[VARIABLE] = str(path)
    probes = Probes(acl=str(library("libascendcl.so")), hccl="", nccl="", nvml="")
    device.set_uce([(address, size)])       # really overwrites these bytes, in the process that owns them
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from resilient_train import _native

VARIABLE = "RESILIENT_FAKE_DEVICE"
FUNCTIONS = (
    "HcclGetCommAsyncError",
    "HcclGetErrorString",
    "HcclCommSuspend",
    "HcclCommResume",
    "HcclCommDestroy",
    "aclrtPeekAtLastError",
    "aclrtGetMemUceInfo",
    "aclrtMemUceRepair",
    "aclrtGetErrorVerbose",
    "ncclCommGetAsyncError",
    "ncclGetErrorString",
    "ncclCommAbort",
    "nvmlInit_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlEventSetCreate",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait_v2",
)
"""The place in this list is the function's number."""

MEMORY_ERROR = 507053
ERROR_TYPE_MEMORY = 1
RANGES_MAX = 128
POISON = 0xA5
"""What every byte of a poisoned range is xor-ed with, so that none keeps its value."""

_MAGIC = 0x3130_4B41_4645_5452
_VERSION = 1
SIZE_BYTES = 15_192
_BEHAVIOURS = 88
_RANGES = 856
_CALLS = 2904
_CALL_SIZE = 48
_CALLS_MAX = 256
_MODES = {"normal": 0, "hang": 1, "garbage": 2, "crash": 3, "overrun": 4}
ANSWERS = tuple(_MODES)
"""How a function can be told to answer, see ``FakeDevice.answer``."""


class DeviceCall(NamedTuple):
    """One call into a look-alike, by any process."""

    function: str
    pid: int
    arguments: tuple[int, ...]
    number: int


def library(name: str) -> Path:
    """The look-alike with this file name. FileNotFoundError where they were not built."""
    path = Path(str(_native.__file__)).parent / "_fake" / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; the look-alike libraries are built by `make setup`")
    return path


class FakeDevice:
    """The control memory. All fields are single aligned words, so that a look-alike sees old or new, never half."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE_BYTES)
        with memoryview(self._memory) as whole:
            self._words, self._signed, self._longs = whole.cast("I"), whole.cast("i"), whole.cast("Q")
        if (self._longs[0], self._words[2], self._words[3]) != (_MAGIC, _VERSION, SIZE_BYTES):
            self.close()
            raise ValueError(f"{path} is no control memory of version {_VERSION}")

    @classmethod
    def create(cls, path: Path) -> FakeDevice:
        """A new file, of a healthy device."""
        header = _MAGIC.to_bytes(8, "little") + _VERSION.to_bytes(4, "little") + SIZE_BYTES.to_bytes(4, "little")
        path.write_bytes(header.ljust(SIZE_BYTES, b"\0"))
        return cls(path)

    def close(self) -> None:
        """Unmap. The file stays."""
        for view in (self._words, self._signed, self._longs):
            view.release()
        self._memory.close()

    def set_uce(self, ranges: Sequence[tuple[int, int]], *, pid: int = 0, code: int = MEMORY_ERROR) -> None:
        """Poison (address, bytes) of process ``pid`` (0: this one), at its next look at the device.

        The thread that looks writes there: the addresses must be that process's own writable memory. ``code`` is what
        the last error becomes; with 0 only the list of ranges shows the fault.
        """
        if len(ranges) > RANGES_MAX:
            raise ValueError(f"{len(ranges)} ranges; a device reports {RANGES_MAX} at most")
        self._words[8] = 0  # nobody reads the list while it is written
        for index, (address, size) in enumerate(ranges):
            at = _RANGES // 8 + 2 * index
            self._longs[at], self._longs[at + 1] = address, size
        self._words[9] = pid or os.getpid()
        self._signed[6] = ERROR_TYPE_MEMORY
        self._words[10] = 1
        self._words[8] = len(ranges)
        if code:
            self.set_last_error(code)

    def clear_memory_errors(self) -> None:
        """No range is poisoned, and there is no last error."""
        self._words[8] = self._words[10] = 0
        self.set_detail(0, repairable=False)
        self.set_last_error(0)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Poisoned ranges that were not repaired yet."""
        at = _RANGES // 8
        return [(self._longs[at + 2 * i], self._longs[at + 2 * i + 1]) for i in range(self._words[8])]

    @property
    def poisonings(self) -> int:
        """How often the bytes of ranges were overwritten."""
        return self._words[11]

    def set_last_error(self, code: int, *, tid: int = 0) -> None:
        """What aclrtPeekAtLastError answers, to one thread or (0) to all."""
        self._words[5] = tid
        self._signed[4] = code

    def set_detail(self, error_type: int, *, repairable: bool) -> None:
        """What aclrtGetErrorVerbose answers."""
        self._words[7] = int(repairable)
        self._signed[6] = error_type

    def set_comm_error(self, code: int, *, comm: int = 0) -> None:
        """The asynchronous error of one communicator, or (0) of all, of HCCL and NCCL."""
        self._longs[7] = comm
        self._signed[12] = code

    def set_ecc_errors(self, count: int) -> None:
        """NVML's counter of uncorrected errors."""
        self._longs[8] = count

    def send_xid(self, xid: int) -> None:
        """One event of NVML; the last one must have been taken."""
        self._longs[9] = xid

    def answer(self, function: str, mode: str) -> None:
        """One of ``ANSWERS``, each of which (``normal`` aside) has a method of its own below."""
        self._words[self._behaviour(function) // 4] = _MODES[mode]

    def hang(self, function: str) -> None:
        """Calls do not return until ``heal``."""
        self.answer(function, "hang")

    def garbage(self, function: str) -> None:
        """Answers that cannot be: counts, codes, null pointers."""
        self.answer(function, "garbage")

    def overrun(self, function: str) -> None:
        """Writes behind the memory that it was given."""
        self.answer(function, "overrun")

    def crash(self, function: str) -> None:
        """SIGSEGV in the caller's process."""
        self.answer(function, "crash")

    def fail(self, function: str, result: int) -> None:
        """Return this code and do nothing."""
        self._signed[self._behaviour(function) // 4 + 1] = result

    def delay(self, function: str, latency_us: int) -> None:
        """Take that long."""
        self._words[self._behaviour(function) // 4 + 2] = latency_us

    def heal(self, functions: Sequence[str] = FUNCTIONS) -> None:
        """These functions behave; those that hang return. Errors and ranges stay."""
        for function in functions:
            self.answer(function, "normal")
            self.fail(function, 0)
            self.delay(function, 0)

    @contextmanager
    def hanging(self, function: str) -> Iterator[None]:
        """``hang`` for a while."""
        self.hang(function)
        try:
            yield
        finally:
            self.answer(function, "normal")

    def count(self, function: str) -> int:
        """Calls so far."""
        return self._longs[self._behaviour(function) // 8 + 2]

    def calls(self, *functions: str, pid: int = 0) -> list[DeviceCall]:
        """The newest 256 calls in order; of these functions and this process only, if given."""
        newest = self._longs[10]
        found = []
        for number in range(max(1, newest - _CALLS_MAX + 1), newest + 1):
            at = _CALLS + (number - 1) % _CALLS_MAX * _CALL_SIZE
            arguments = tuple(self._longs[at // 8 + 2 : at // 8 + 6])
            call = DeviceCall(FUNCTIONS[self._words[at // 4 + 2]], self._words[at // 4 + 3], arguments, number)
            complete = self._longs[at // 8] == number
            if complete and (not functions or call.function in functions) and pid in {0, call.pid}:
                found.append(call)
        return found

    def _behaviour(self, function: str) -> int:
        return _BEHAVIOURS + 24 * FUNCTIONS.index(function)
