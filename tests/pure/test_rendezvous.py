"""The store of a job, and whose descriptors it takes."""

import contextlib
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch._C._distributed_c10d import TCPStore

from resilient_train.errors import ConfigError
from resilient_train.launch.agent.rendezvous import make_store

CLIENTS = 40


def _count(port: int) -> int:
    """The descriptors of this process's table that are connections to or from that port."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()]
    sockets = {f"socket:[{row[9]}]" for row in rows[1:] if f":{port:04X}" in (row[1][-5:], row[2][-5:])}
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another test's, closed meanwhile
            found += str(each.readlink()) in sockets
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_it_serves_with_descriptors_of_its_own_or_without(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, where the kernel is too old, or a container forbids it."""
    if shared:
        monkeypatch.setattr("resilient_train.descriptors._CLOSE_RANGE", 10_000)
    store = make_store("127.0.0.1", 0)
    clients = [TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(CLIENTS)]
    clients[0].set("a", "b")
    assert [each.get("a") for each in clients] == [b"b"] * CLIENTS
    assert store.list_keys() == ["a"]
    ours = CLIENTS + 1
    assert _count(store.port) >= 2 * ours if shared else _count(store.port) == ours


def test_its_threads_take_no_signal() -> None:
    """What is written there to a descriptor of the event loop's goes elsewhere: a SIGTERM was lost."""
    before = {each.name for each in Path("/proc/self/task").iterdir()}
    make_store("127.0.0.1", 0)
    blocked = [
        int(next(row for row in (each / "status").read_text().splitlines() if row.startswith("SigBlk")).split()[1], 16)
        for each in Path("/proc/self/task").iterdir()
        if each.name not in before
    ]
    assert blocked
    assert all(each >> (signal.SIGTERM - 1) & 1 for each in blocked)
    assert not any(each >> (signal.SIGSEGV - 1) & 1 for each in blocked)


def test_a_port_that_is_taken() -> None:
    store = make_store("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"the store can't listen on 127.0.0.1:{store.port}: .*in use"):
        make_store("127.0.0.1", store.port)
