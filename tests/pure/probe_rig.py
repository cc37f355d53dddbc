"""What the tests of the probes share."""

import ctypes
import select
import time
from collections.abc import Callable
from pathlib import Path

from resilient_train._native import Finding, Probes

POLL_MS = 1
LIMIT_MS = 500  # for calls that are to exceed it; elsewhere a busy machine must not
WAIT_S = 20.0
COMM = 0x7000_0001
OFF = {"hccl": "", "acl": "", "nccl": "", "nvml": ""}
FILES = {"hccl": "libhccl.so", "acl": "libascendcl.so", "nccl": "libnccl.so.2", "nvml": "libnvidia-ml.so.1"}

Make = Callable[..., Probes]
Copy = Callable[[str], str]


def wait_for(probes: Probes, count: int = 1) -> list[Finding]:
    found: list[Finding] = []
    end = time.monotonic() + WAIT_S
    while len(found) < count:
        assert select.select([probes.fd], [], [], end - time.monotonic())[0], f"waited in vain, have {found}"
        found += probes.take()
    assert len(found) == count, [(each.kind, each.text) for each in found]
    return found


def wait_for_one(probes: Probes) -> Finding:
    return wait_for(probes)[0]


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)


def let_it_poll(probes: Probes, polls: int = 3) -> None:
    """Until every probe has been round that often: what it would have found, it has found."""
    target = [status.polls + polls for status in probes.status()]
    eventually(lambda: all(status.polls >= each for status, each in zip(probes.status(), target, strict=True)))


def tensor(size: int = 4096) -> tuple[ctypes.Array[ctypes.c_ubyte], int]:
    array = (ctypes.c_ubyte * size)(*([7] * size))
    return array, ctypes.addressof(array)


def thread_names() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(path.read_text().strip())
        except OSError:  # it has ended
            continue
    return names
