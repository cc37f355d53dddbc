"""Faults of a look-alike device library in a job that runs (``resilient-train inject RUN device``).

The control memory that a process reads is found by what the kernel says of the process: the file is among its mappings
from the library's first call on, and before that its name is in the environment that the process was started with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from resilient_train.errors import ConfigError
from resilient_train.faults import nearest
from resilient_train.testing.fake_device import (
    ANSWERS,
    FUNCTIONS,
    MEMORY_ERROR,
    RANGES_MAX,
    SIZE_BYTES,
    VARIABLE,
    FakeDevice,
)


class Library(NamedTuple):
    """``usual`` is the function that a probe calls at every poll; ``error`` says what ``--error`` sets."""

    prefix: str
    usual: str
    error: str


LIBRARIES = {
    "acl": Library("aclrt", "aclrtGetMemUceInfo", "the last error"),
    "hccl": Library("Hccl", "HcclGetCommAsyncError", "the error of all communicators"),
    "nccl": Library("nccl", "ncclCommGetAsyncError", "the error of all communicators"),
    "nvml": Library("nvml", "nvmlEventSetWait_v2", "the XID of the next event"),
}
_INT32 = range(-(1 << 31), 1 << 31)
_LATENCY_MS_MAX = 3_600_000


class DeviceFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a library is to answer from now on. Raises ConfigError for what it can't."""

    library: str
    error: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    """(address, bytes) in the process's own memory: really overwritten, and reported as lost."""
    ecc: int | None = None
    call: str = ""
    """The function that ``answer``, ``returns`` and ``latency_ms`` are about; empty: the library's ``usual`` one."""
    answer: str = ""
    returns: int | None = None
    latency_ms: float | None = None
    heal: bool = False
    """Before all else: the library's functions behave again, and its errors are gone."""

    def __post_init__(self) -> None:
        if self.library not in LIBRARIES:
            known = ", ".join(LIBRARIES)
            raise ConfigError(f"--library {self.library!r} is not one of {known}{nearest(self.library, LIBRARIES)}")
        if self.call and self.call not in self.functions():
            known = ", ".join(self.functions())
            raise ConfigError(f"--call {self.call!r} is none of {known}{nearest(self.call, self.functions())}")
        if self.answer and self.answer not in ANSWERS:
            raise ConfigError(f"--answer {self.answer!r} is not one of {', '.join(ANSWERS)}")
        if self.ranges and self.library != "acl":
            raise ConfigError(f"--range: only acl reports ranges, not {self.library}")
        if self.ecc is not None and self.library != "nvml":
            raise ConfigError(f"--ecc: only nvml counts ECC errors, not {self.library}")
        of_call = bool(self.answer) or self.returns is not None or self.latency_ms is not None
        if self.call and not of_call:
            raise ConfigError("--call says whose answer it is: add --answer, --returns or --latency-ms")
        if not (of_call or self.heal or self.ranges or self.error is not None or self.ecc is not None):
            raise ConfigError(
                "device: say what the library is to answer: --error, --range, --ecc, --answer, --returns, --latency-ms "
                "or --heal"
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("error", "returns"):
            value = getattr(self, name)
            if value is not None and value not in _INT32:
                raise ConfigError(f"--{name} {value} is no number of 32 bits")
        if self.library == "nvml" and self.error is not None and self.error < 0:
            raise ConfigError(f"--error {self.error}: an XID is a number from 0")
        if self.ecc is not None and not 0 <= self.ecc < 1 << 64:
            raise ConfigError(f"--ecc {self.ecc} must be a number from 0")
        if self.latency_ms is not None and not 0 <= self.latency_ms <= _LATENCY_MS_MAX:
            raise ConfigError(f"--latency-ms {self.latency_ms} must be from 0 to {_LATENCY_MS_MAX}")
        if len(self.ranges) > RANGES_MAX:
            raise ConfigError(f"--range: {len(self.ranges)} of them; a device reports {RANGES_MAX} at most")

    def functions(self) -> tuple[str, ...]:
        """The library's functions."""
        prefix = LIBRARIES[self.library].prefix
        return tuple(name for name in FUNCTIONS if name.startswith(prefix))

    def apply(self, device: FakeDevice, pid: int) -> None:
        """Sets it. Ranges are poisoned in process ``pid``."""
        if self.heal:
            device.heal(self.functions())
            if self.library == "acl":
                device.clear_memory_errors()
            else:
                self._set_error(device, 0)
        function = self.call or LIBRARIES[self.library].usual
        if self.latency_ms is not None:
            device.delay(function, round(self.latency_ms * 1000))
        if self.returns is not None:
            device.fail(function, self.returns)
        if self.answer:
            device.answer(function, self.answer)
        if self.ecc is not None:
            device.set_ecc_errors(self.ecc)
        if self.ranges:
            device.set_uce(self.ranges, pid=pid, code=MEMORY_ERROR if self.error is None else self.error)
        elif self.error is not None:
            self._set_error(device, self.error)

    def _set_error(self, device: FakeDevice, code: int) -> None:
        if self.library == "acl":
            device.set_last_error(code)
        elif self.library == "nvml":
            device.send_xid(code)
        else:
            device.set_comm_error(code)


def parse_range(text: str) -> tuple[int, int]:
    """``ADDRESS:BYTES``, each decimal or hexadecimal with 0x. Raises ConfigError."""
    address, colon, size = text.partition(":")
    with contextlib.suppress(ValueError):
        found = int(address, 0), int(size, 0)
        if colon and found[0] > 0 and found[1] > 0 and sum(found) < 1 << 64:
            return found
    raise ConfigError(f"--range {text!r}: write ADDRESS:BYTES, as in 0x7f0012345000:4096")


class _Mapping(NamedTuple):
    begin: int
    end: int
    writable: bool
    path: str


def _mappings(pid: int) -> list[_Mapping]:
    """``/proc/PID/maps``, see proc_pid_maps(5)."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, access, _offset, _device, _inode, *path = line.split(maxsplit=5)
        begin, _, end = addresses.partition("-")
        found.append(_Mapping(int(begin, 16), int(end, 16), "w" in access, path[0] if path else ""))
    return found


def control_path(pid: int) -> Path:
    """The control memory that process ``pid`` reads. Raises ConfigError if it runs with no look-alike."""
    try:
        paths = {each.path for each in _mappings(pid) if each.path.startswith("/")}
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise ConfigError(f"process {pid} can't be looked at: {error.strerror or error}") from None
    prefix = f"{VARIABLE}=".encode()
    named = [each.removeprefix(prefix).decode(errors="surrogateescape") for each in environ if each.startswith(prefix)]
    # A file that was made after the start (by the script, for its own rank) is the one that is read.
    for path in [*sorted(paths), *named]:
        if _is_control(Path(path)):
            return Path(path)
    raise ConfigError(f"process {pid} runs with no look-alike device: {VARIABLE} names no control memory there")


def reads(pid: int, path: Path) -> bool:
    """Whether process ``pid`` reads that control memory."""
    try:
        return control_path(pid).samefile(path)
    except (ConfigError, OSError):
        return False


def _is_control(path: Path) -> bool:
    try:
        # Only a file of the right size is opened at all: among a process's mappings there may be devices.
        if not path.is_file() or path.stat().st_size != SIZE_BYTES:
            return False
        FakeDevice(path).close()
    except (OSError, ValueError):
        return False
    return True


def check_ranges(pid: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Raises ConfigError unless the process may write there: the look-alike will, and would crash it."""
    try:
        writable = sorted((each.begin, each.end) for each in _mappings(pid) if each.writable)
    except OSError as error:
        raise ConfigError(f"process {pid} can't be looked at: {error.strerror or error}") from None
    for address, size in ranges:
        reached = address
        for begin, end in writable:
            if begin <= reached < end:
                reached = end
        if reached < address + size:
            raise ConfigError(f"--range {address:#x}:{size}: is not writable memory of process {pid}")
