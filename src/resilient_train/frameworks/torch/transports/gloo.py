"""gloo: its connections are TCP sockets, and what is blocked in it ends when they are shut."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

Socket = tuple[int, int]
"""(descriptor, inode): numbers alone are reused too soon to tell old from new."""


def stock_group(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group of torch's own with gloo in it, so that every verb is there. Blocks until all members have come."""
    backend = ProcessGroupGloo(store, rank, size, timeout=timeout)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    backend._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def create(
    store: Store, book: AddressBook, rank: int, size: int, timeout: timedelta
) -> tuple[dist.ProcessGroup, list[Socket]]:
    """A group, and its connections. Blocks until all members have come. ``book``: what went through ``store``.

    Raises RuntimeError if a member dies meanwhile (gloo notices after about 5 s).
    """
    before = sockets()
    group = stock_group(store, rank, size, timeout)
    fresh = [pair for pair in sockets() if pair not in before and is_connected(*pair)]
    # Others may have opened connections meanwhile, on other threads: the user's are none of ours to shut.
    ports = book.ports()
    return group, [pair for pair in fresh if ports & ends(pair[0])] if ports else fresh


class AddressBook:
    """The addresses that members publish in the store for each other: a ``sockaddr`` lies in each."""

    _FAMILY, _PORT = slice(16, 18), slice(18, 20)

    def __init__(self) -> None:
        self._values: list[bytes] = []

    def note(self, value: Any) -> None:
        """One value that was written or read."""
        self._values.append(value if isinstance(value, bytes) else str(value).encode())

    def ports(self) -> frozenset[int]:
        """Where members listen; empty if one of the values is not understood."""
        found = set()
        for value in self._values:
            if int.from_bytes(value[self._FAMILY], "little") not in (socket.AF_INET, socket.AF_INET6):
                return frozenset()
            found.add(int.from_bytes(value[self._PORT], "big"))
        return frozenset(found)


def ends(descriptor: int) -> set[int]:
    """The ports of both ends of a connection."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as probe:
            return {probe.getsockname()[1], probe.getpeername()[1]}
    except OSError:
        return set()


def inode(descriptor: int) -> int:
    """That of an open file; -1 if there is none."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


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
