"""gloo: its connections are TCP sockets, and what is blocked in it ends when they are shut."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import sys
import termios
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from resilient_train.config import checks_for_nan, gloo_connects_late
from resilient_train.errors import ProtocolError, UsageError

Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]
"""With the port."""
_STORAGE_BYTES = 128
Socket = tuple[int, int]
"""(descriptor, inode): numbers alone are reused too soon to tell old from new."""


def stock_group(
    store: Store, rank: int, size: int, timeout: timedelta, name: str = "", description: str = ""
) -> dist.ProcessGroup:
    """A group of torch's own with gloo in it, so that every verb is there. Blocks until all members have come.

    ``name`` and ``description`` are what torch's recorder calls it.
    """
    backend = ProcessGroupGloo(store, rank, size, timeout=timeout)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    if torch.torch_version.TorchVersion(torch.__version__) < "2.14":  # from then on a group numbers by itself
        backend._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_group_name(GroupName(name))
    group._set_group_desc(description)
    if checks_for_nan() and hasattr(distributed_c10d, "NanCheckHook"):  # not before torch 2.15
        distributed_c10d.NanCheckHook.attach(group)  # torch hooks it into the outer group, whose calls pass it by
    return group


def create(
    store: Store, book: AddressBook, rank: int, size: int, timeout: timedelta, name: str = "", description: str = ""
) -> tuple[dist.ProcessGroup, list[Socket]]:
    """A ``stock_group``, and its connections. ``book``: what went through ``store``.

    Raises RuntimeError if a member dies meanwhile (gloo notices after about 5 s), ProtocolError if it is not this gloo,
    UsageError if it is told to connect late.
    """
    if gloo_connects_late():
        raise UsageError(
            "TORCH_GLOO_LAZY_INIT lets gloo connect ranks when they first need it: such connections can't be known, "
            "nor shut when a rank is lost; unset it"
        )
    before = sockets()
    group = stock_group(store, rank, size, timeout, name, description)
    fresh = [pair for pair in sockets() if pair not in before and is_connected(*pair)]
    # Others may have opened connections meanwhile, on other threads: the user's are none of ours to shut.
    listeners = book.listeners()
    return group, [pair for pair in fresh if listeners & ends(pair[0])]


class AddressBook:
    """What members publish in the store for each other: the host's name, a ``sockaddr_storage``, numbers of pairs. Each
    part has its length before it, in 8 bytes.
    """

    def __init__(self) -> None:
        self._values: list[bytes] = []

    def note(self, value: Any) -> None:
        """One value that was written or read."""
        self._values.append(value if isinstance(value, bytes) else str(value).encode())

    def listeners(self) -> frozenset[Address]:
        """Where members listen. Raises ProtocolError for a value that is none of this gloo's."""
        return frozenset(map(_listener, self._values))


def _listener(value: bytes) -> Address:
    length = int.from_bytes(value[:8], "little")
    name_end = 8 + length
    storage = value[name_end + 8 :]
    family = int.from_bytes(storage[:2], sys.byteorder)
    places = {int(socket.AF_INET): slice(4, 8), int(socket.AF_INET6): slice(8, 24)}
    if len(storage) < _STORAGE_BYTES or family not in places:
        raise ProtocolError(
            "gloo publishes its addresses in a form that is not known here, so that its connections can't be told from "
            f"others: torch {torch.__version__} is not the one that this version was made for"
        )
    return ipaddress.ip_address(storage[places[family]]), int.from_bytes(storage[2:4], "big")


def ends(descriptor: int) -> set[Address]:
    """Both ends of a connection."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as probe:
            return {(ipaddress.ip_address(name[0].partition("%")[0]), name[1]) for name in _names(probe)}
    except OSError:
        return set()


def _names(connection: socket.socket) -> Iterator[tuple[str, int]]:
    yield connection.getsockname()[:2]
    yield connection.getpeername()[:2]


def inode(descriptor: int) -> int:
    """That of an open file; -1 if there is none."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


def unread(descriptor: int) -> int:
    """How many bytes have come by a connection, and are not read; 0 if it was closed meanwhile."""
    count = bytearray(4)
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        return 0
    return int.from_bytes(count, sys.byteorder)


def sockets() -> set[Socket]:
    """All of this process's."""
    return set(_sockets())


def _sockets() -> Iterator[Socket]:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - strings are what it takes, in the middle of a recovery
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115 - likewise
                yield int(name), inode(int(name))
        except FileNotFoundError:
            continue  # closed since the listing: the listing's own descriptor is one


def is_connected(descriptor: int, number: int) -> bool:
    """True for a connected TCP socket. Shutting gloo's listener would end the process (std::terminate)."""
    try:
        held = os.dup(descriptor)
    except OSError:
        return False  # closed since it was listed: one of an older group's, which another thread is freeing
    with socket.socket(fileno=held) as probe:
        if inode(held) != number:
            return False
        if probe.family not in (socket.AF_INET, socket.AF_INET6) or probe.type != socket.SOCK_STREAM:
            return False
        if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            probe.getpeername()
        except OSError:
            return False
        return True
