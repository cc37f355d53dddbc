"""``resilient-train inject RUN device``: what can be said, which process is meant, what its library answers then."""

import ctypes
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pure.probe_rig import COMM, Make, let_it_poll
from resilient_train.errors import ConfigError
from resilient_train.testing.device_faults import (
    LIBRARIES,
    DeviceFault,
    check_ranges,
    control_path,
    parse_range,
    reads,
)
from resilient_train.testing.fake_device import VARIABLE, FakeDevice


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"library": "acll", "error": 1}, "did you mean 'acl'"),
        ({"library": "acl"}, "say what the library is to answer"),
        ({"library": "acl", "call": "aclrtMemUceRepair"}, "add --answer, --returns or --latency-ms"),
        ({"library": "acl", "call": "HcclCommResume", "answer": "hang"}, "is none of aclrtPeekAtLastError"),
        ({"library": "nccl", "call": "ncclCommAbrt", "returns": 3}, "did you mean 'ncclCommAbort'"),
        ({"library": "acl", "answer": "hung"}, "normal, hang, garbage, crash, overrun"),
        ({"library": "hccl", "ranges": ((8, 8),)}, "only acl reports ranges"),
        ({"library": "acl", "ecc": 1}, "only nvml counts"),
        ({"library": "nvml", "ecc": -1}, "a number from 0"),
        ({"library": "nvml", "error": -1}, "an XID is a number from 0"),
        ({"library": "acl", "error": 1 << 31}, "no number of 32 bits"),
        ({"library": "acl", "returns": -(1 << 31) - 1}, "no number of 32 bits"),
        ({"library": "acl", "latency_ms": float("nan")}, "must be from 0"),
        ({"library": "acl", "latency_ms": 1e9}, "must be from 0"),
        ({"library": "acl", "ranges": ((8, 8),) * 129}, "128 at most"),
    ],
)
def test_what_can_not_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DeviceFault(**options)


def test_every_library_has_its_usual_function() -> None:
    for name, library in LIBRARIES.items():
        assert library.usual in DeviceFault(library=name, heal=True).functions()
    assert sum(len(DeviceFault(library=name, heal=True).functions()) for name in LIBRARIES) == 19


def test_ranges() -> None:
    assert parse_range("0x1000:16") == (4096, 16)
    assert parse_range("4096:0x10") == (4096, 16)
    for text in ("", "4096", "0:16", "16:0", "-4096:16", "a:b", "1:2:3", f"{2**64 - 1}:1"):
        with pytest.raises(ConfigError, match="ADDRESS:BYTES"):
            parse_range(text)


def test_ranges_lie_in_memory_that_the_process_may_write() -> None:
    memory = ctypes.create_string_buffer(4096)
    address = ctypes.addressof(memory)
    check_ranges(os.getpid(), [(address, 4096), (address + 4095, 1)])
    for bad in ((8, 16), (address, 1 << 50), (id(None) & ~0xFFF | 1 << 62, 8)):
        with pytest.raises(ConfigError, match="not writable memory"):
            check_ranges(os.getpid(), [(address, 8), bad])


def test_the_memory_that_a_process_reads(device: FakeDevice, tmp_path: Path) -> None:
    # Not of this process: look-alikes that other tests have loaded stay mapped in it.
    maps = "import mmap, sys; file = open(sys.argv[1], 'r+b'); kept = mmap.mmap(file.fileno(), 0); print(); input()"
    command = [sys.executable, "-u", "-c", maps, str(tmp_path / "device")]
    environ = {key: value for key, value in os.environ.items() if key != VARIABLE}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as mapper:
        assert mapper.stdin is not None
        assert mapper.stdout is not None
        mapper.stdout.readline()
        assert control_path(mapper.pid).samefile(tmp_path / "device"), "mapped"
        mapper.stdin.close()
    shows = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(shows, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()  # it runs what it is to run: before that its environment is its parent's
        assert reads(other.pid, tmp_path / "device"), "named in its environment"
        (tmp_path / "device").write_bytes(bytes(15_192))
        with pytest.raises(ConfigError, match="runs with no look-alike device"):
            control_path(other.pid)
        other.stdin.close()
    with pytest.raises(ConfigError, match="can't be looked at"):
        control_path(other.pid)


def test_no_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    shows = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(shows, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()  # it runs what it is to run: before that its environment is its parent's
        with pytest.raises(ConfigError, match="names no control memory"):
            control_path(other.pid)
        other.stdin.close()


def test_errors_and_ranges_are_seen_by_the_probe_and_healed(make: Make, device: FakeDevice) -> None:
    memory = ctypes.create_string_buffer(64)
    fault = DeviceFault(library="acl", ranges=((ctypes.addressof(memory), 64),))
    probes = make("acl")
    fault.apply(device, os.getpid())
    let_it_poll(probes)
    (found,) = {(each.kind, each.code, tuple(each.ranges)) for each in probes.take() if each.ranges}
    assert found == ("UCE", 507053, fault.ranges)
    assert memory.raw == b"\xa5" * 64
    DeviceFault(library="acl", heal=True).apply(device, os.getpid())
    assert device.ranges == []
    probes.rearm()
    let_it_poll(probes)
    assert probes.take() == []


@pytest.mark.parametrize(
    ("library", "code", "expected"),
    [("acl", 507054, "UCE"), ("hccl", 5, "HCCE"), ("nccl", 6, "HCCE"), ("nvml", 48, "UCE")],
)
def test_errors_of_each_library(make: Make, device: FakeDevice, library: str, code: int, expected: str) -> None:
    probes = make(library)
    if library in {"hccl", "nccl"}:
        probes.add_comm(library, COMM)
    let_it_poll(probes)
    DeviceFault(library=library, error=code).apply(device, os.getpid())
    let_it_poll(probes)
    assert [(each.kind, each.code) for each in probes.take()] == [(expected, code)]


def test_a_function_that_never_returns(make: Make, device: FakeDevice) -> None:
    probes = make("acl", call_limit_ms=60)
    let_it_poll(probes)
    DeviceFault(library="acl", answer="hang").apply(device, os.getpid())
    assert select.select([probes.fd], [], [], 20)[0]
    assert [each.kind for each in probes.take()] == ["DISABLED"]
    DeviceFault(library="acl", heal=True).apply(device, os.getpid())


def test_a_function_that_fails_and_one_that_takes_its_time(make: Make, device: FakeDevice) -> None:
    probes = make("acl")
    let_it_poll(probes)
    DeviceFault(library="acl", call="aclrtMemUceRepair", returns=3).apply(device, os.getpid())
    assert probes.repair_memory([(64, 8)], 0) == 3
    DeviceFault(library="acl", call="aclrtMemUceRepair", latency_ms=300).apply(device, os.getpid())
    with pytest.raises(TimeoutError):
        probes.repair_memory([(64, 8)], limit_ms=20)


def test_ecc_errors(make: Make, device: FakeDevice) -> None:
    probes = make("nvml")
    let_it_poll(probes)
    DeviceFault(library="nvml", ecc=2).apply(device, os.getpid())
    let_it_poll(probes)
    assert [each.kind for each in probes.take()] == ["UCE"]
