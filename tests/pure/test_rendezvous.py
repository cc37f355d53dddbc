"""The store of a job, and whose descriptors it takes."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch._C._distributed_c10d import TCPStore

from resilient_train.errors import ConfigError
from resilient_train.launch.agent.rendezvous import make_store

CLIENTS = 40


def _count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_it_serves_with_descriptors_of_its_own_or_without(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, where the kernel is too old, or a container forbids it."""
    if shared:
        monkeypatch.setattr("resilient_train.descriptors._CLOSE_RANGE", 10_000)
    before = _count()
    store = make_store("127.0.0.1", 0)
    clients = [TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(CLIENTS)]
    clients[0].set("a", "b")
    assert [each.get("a") for each in clients] == [b"b"] * CLIENTS
    assert store.list_keys() == ["a"]
    ours = CLIENTS + 1
    grown = _count() - before
    half_more = ours + ours // 2  # other tests' descriptors may be closed meanwhile
    assert grown > half_more if shared else grown < half_more


def test_a_port_that_is_taken() -> None:
    store = make_store("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"the store can't listen on 127.0.0.1:{store.port}: .*in use"):
        make_store("127.0.0.1", store.port)
