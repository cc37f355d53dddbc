"""A process group whose peers went away between the building of its connections and their use."""

import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from resilient_train.errors import ProtocolError, UsageError
from resilient_train.frameworks.torch.communication import process_group as group_module
from resilient_train.frameworks.torch.communication.gloo_at_rest import gloos_threads
from resilient_train.frameworks.torch.communication.process_group import BuiltGroup, ResilientGroup
from resilient_train.frameworks.torch.communication.transports import gloo
from resilient_train.frameworks.torch.groups import _strange_backend

Connection = tuple[socket.socket, socket.socket]


@pytest.fixture
def connection() -> Iterator[Connection]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has a Session; what guards a work of gloo's has tests of its own."""
    monkeypatch.setattr(group_module, "_watcher", SimpleNamespace(compare=lambda *_: None, take_back=lambda *_: None))
    monkeypatch.setattr(group_module, "GuardedWork", lambda work, _live: work)


def adopted(ours: socket.socket, inode: int) -> ResilientGroup:
    group = ResilientGroup(dist.HashStore(), 0, 2, "group", [0, 1], timedelta(seconds=1))
    inner: Any = SimpleNamespace(allreduce=lambda *_: "done")
    group.adopt(BuiltGroup(1, inner, [(ours.fileno(), inode)]))
    return group


def test_a_peer_that_is_there(connection: Connection) -> None:
    group = adopted(connection[0], os.fstat(connection[0].fileno()).st_ino)
    assert group.run("allreduce", ([torch.ones(1)],)) == "done"
    assert not group.broken()


def test_a_peer_that_hangs_up(connection: Connection) -> None:
    group = adopted(connection[0], os.fstat(connection[0].fileno()).st_ino)
    connection[1].close()
    assert group.broken()
    with pytest.raises(RuntimeError, match="has hung up"):
        group.run("allreduce", ([torch.ones(1)],))


@pytest.mark.parametrize("gone", ["closed", "reused"])
def test_a_connection_that_is_gone_before_it_is_adopted(connection: Connection, gone: str) -> None:
    """gloo closes it as soon as the peer dies: that may be before this thread has come to look at it."""
    ours, _ = connection
    inode = os.fstat(ours.fileno()).st_ino
    if gone == "closed":
        number, fake = ours.fileno(), SimpleNamespace(fileno=lambda: number)
        ours.close()
        group = adopted(fake, inode)  # type: ignore[arg-type] # all that is asked of it is its number
    else:
        group = adopted(ours, inode + 1)
    assert group.broken()
    with pytest.raises(RuntimeError, match="has hung up"):
        group.run("allreduce", ([torch.ones(1)],))


def test_what_counts_as_a_connection_of_the_group() -> None:
    """Asked right after the sockets were listed: meanwhile another thread may close some, and numbers come again."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        inode = os.fstat(ours.fileno()).st_ino
        assert gloo.is_connected(ours.fileno(), inode)
        assert not gloo.is_connected(ours.fileno(), inode + 1)
        assert not gloo.is_connected(listener.fileno(), os.fstat(listener.fileno()).st_ino)
        number = ours.fileno()
        ours.close()
        assert not gloo.is_connected(number, inode)


def published(name: bytes, storage: bytes) -> bytes:
    """As gloo writes it: the host's name, a ``sockaddr_storage`` and a number, the numbers of pairs."""
    address = storage.ljust(128, b"\xbf") + b"\xff" * 8
    return struct.pack("<Q", len(name)) + name + struct.pack("<Q", len(address)) + address + bytes(16)


def listeners(*values: Any) -> frozenset[gloo.Address]:
    book = gloo.AddressBook()
    for value in values:
        book.note(value)
    return book.listeners()


@pytest.mark.parametrize("name", [b"", b"vm", b"a-host-with-a-long-name"])
def test_where_members_listen(name: bytes) -> None:
    four = struct.pack("=H", socket.AF_INET) + struct.pack(">H", 4321) + bytes([192, 0, 2, 7])
    six = struct.pack("=H", socket.AF_INET6) + struct.pack(">H", 7) + bytes(4) + ipaddress.ip_address("fd00::2").packed
    found = listeners(published(name, four), published(name, six))
    assert {(str(address), port) for address, port in found} == {("192.0.2.7", 4321), ("fd00::2", 7)}


@pytest.mark.parametrize("value", [b"", b"short", "text", published(b"vm", b"\x01\x00" + bytes(20)), b"\xff" * 300])
def test_an_address_of_another_gloo_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="in a form that is not known here"):
        listeners(value)


def test_a_gloo_that_connects_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with pytest.raises(UsageError, match="TORCH_GLOO_LAZY_INIT"):
        gloo.create(dist.HashStore(), gloo.AddressBook(), 0, 1, timedelta(seconds=1))


def test_messages_of_a_group_that_has_no_backend_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 asks in front of a batch of them what the backend can do: of a rank that has not joined, or is cut."""
    group = ResilientGroup(dist.HashStore(), 0, 2, "group", [0, 1], timedelta(seconds=1))
    seen: list[str] = []
    watcher = SimpleNamespace(issue=lambda _group, verb, _args: seen.append(verb))
    monkeypatch.setattr(group_module, "_watcher", watcher)
    world = dist.distributed_c10d._world
    monkeypatch.setitem(world.pg_group_ranks, group, {0: 0, 1: 1})
    messages = [dist.P2POp(dist.isend, torch.ones(2), group_peer=1, group=group)]
    (alone,) = dist.batch_isend_irecv(messages)
    assert alone.is_completed()
    group.solo = False
    group.close_inner("a recovery is under way")
    dist.batch_isend_irecv(messages)
    assert seen == ["send"]
    with pytest.raises(UsageError, match="'group' can't answer _get_backend: a recovery is under way"):
        _ = group.get_backend(torch.device("cpu")).options


@pytest.mark.skipif(not hasattr(dist.distributed_c10d, "NanCheckHook"), reason="torch 2.15, or later")
def test_a_nan_in_a_collective_is_seen_where_torch_is_told_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    group = gloo.stock_group(dist.HashStore(), 0, 1, timedelta(seconds=10))
    group.allreduce([torch.ones(1)]).wait()
    with pytest.raises(RuntimeError, match="NaN found in input tensor"):
        group.allreduce([torch.tensor([1.0, float("nan")])])


def test_groups_that_need_not_be_rebuilt() -> None:
    """torchtitan has them: of dimensions of its meshes that nothing is divided over."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = dist.new_group(backend="fake")
        assert _strange_backend() == ""
        dist.distributed_c10d._world.pg_map[group] = ("ucc", None)  # type: ignore[index]
        assert _strange_backend() == "ucc"
    finally:
        dist.destroy_process_group()


def gloo_of_one(name: str) -> ResilientGroup:
    group = ResilientGroup(dist.HashStore(), 0, 1, name, [0], timedelta(seconds=9))
    inner: Any = gloo.stock_group(dist.HashStore(), 0, 1, timedelta(seconds=9))
    group.adopt(BuiltGroup(1, inner, []))
    return group


def test_no_thread_of_gloos_is_left_when_the_interpreter_goes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that wants the GIL then ends the process by SIGABRT. A fork has none of them: it would wait for ever."""
    before = gloos_threads().items()
    monkeypatch.setattr(group_module, "groups", {name: gloo_of_one(name) for name in ("first", "second")})
    assert gloos_threads().items() > before
    pid = os.fork()
    if pid == 0:
        group_module.end_all()
        os._exit(0 if all(each.inner is not None for each in group_module.groups.values()) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    group_module.end_all()
    assert gloos_threads().items() <= before
    with pytest.raises(UsageError, match="'first' can't be used: the process ends"):
        group_module.groups["first"].run_inner("allreduce", ([torch.ones(1)],))


def test_where_no_thread_can_be_started_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    before = gloos_threads().items()
    monkeypatch.setattr(group_module, "groups", {"only": gloo_of_one("only")})
    monkeypatch.setattr(threading.Thread, "start", refuses)
    group_module.end_all()
    assert gloos_threads().items() <= before
