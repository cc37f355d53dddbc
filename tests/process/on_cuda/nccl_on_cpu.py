"""An NCCL without a GPU: tensors lie on the CPU, collectives go over gloo, and a device is a little state.

What is kept of the real one (measured on an H100 with torch 2.11 and NCCL 2.28, ``docs/facts.md``): a collective whose
peer has died ends when its communicators are aborted, and not before; what it leaves is rubbish, and nothing raises;
a thread that waits for it is reached by no signal; an aborted communicator raises when it is used; of a call that is
not asynchronous there is no work.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from resilient_train.frameworks.roles import Addresses
from resilient_train.frameworks.torch.communication.address_store import AddressStore, FirstAddresses
from resilient_train.frameworks.torch.communication.collective_results import POINT_TO_POINT, VERBS, done, flat
from resilient_train.frameworks.torch.communication.process_group import BuiltGroup
from resilient_train.frameworks.torch.communication.transports import gloo
from resilient_train.frameworks.torch.communication.transports.nccl import NcclGroup

RUBBISH = 0xA5


class Inner(dist.ProcessGroup):
    """A group and its backend in one, which torch allows."""

    def __init__(self, store: Any, rank: int, size: int, name: str, timeout: Any) -> None:
        super().__init__(rank, size)
        self._given = store, rank, size, name, timeout
        self._lock = threading.Lock()
        self._link: Any = None
        self._sockets: list[gloo.Socket] = []
        self._aborted = False
        self._under_way: list[torch.futures.Future[bool]] = []
        self.options = SimpleNamespace(_timeout=timeout)

    def _get_backend(self, _: torch.device) -> Inner:
        return self

    def _comm_ptr(self) -> int:
        return 0

    def _connect(self) -> Any:
        if self._link is None:
            store, rank, size, name, timeout = self._given
            book = gloo.AddressBook()
            addresses = AddressStore(FirstAddresses(store, 0), name, range(size), book.note)
            self._link, self._sockets = gloo.create(addresses, book, rank, size, timeout)
        return self._link

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            waiting, self._under_way = self._under_way, []
        for each in waiting:
            each.set_result(False)
        for descriptor, inode in self._sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if gloo.inode(connection.fileno()) == inode:
                    connection.shutdown(socket.SHUT_RDWR)
        self._link, self._sockets = None, []

    def compute(self, operation: Callable[[Any], Any], outputs: list[torch.Tensor]) -> None:
        """Has the device do something, and waits for it as a stream is waited for: in C++, deaf to signals."""
        outcome: torch.futures.Future[bool] = torch.futures.Future()
        with self._lock:
            if self._aborted:
                raise dist.DistBackendError("NCCL communicator was aborted on rank 0.")
            self._under_way.append(outcome)
            link = self._connect()

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # a peer is gone: the kernel spins on
                operation(link).wait()
                with self._lock:
                    if outcome in self._under_way:
                        self._under_way.remove(outcome)
                        outcome.set_result(True)

        kernel = threading.Thread(target=run, name="nccl", daemon=True)
        kernel.start()
        if outcome.wait():
            kernel.join()  # one that came back from C++ while the interpreter goes down would abort it
            return
        _cut.append(kernel)
        for each in outputs:
            each.detach().view(torch.uint8).fill_(RUBBISH)


_cut: list[threading.Thread] = []


@atexit.register
def _end() -> None:
    for each in _cut:
        each.join(2.0)


def _verb(verb: str) -> Callable[..., dist.Work | None]:
    def call(self: Inner, *args: Any) -> dist.Work | None:
        outputs = list(args[0]) if verb.startswith("recv") else VERBS[verb].filled(args, 0) if verb in VERBS else []
        self.compute(lambda link: getattr(link, verb)(*args), flat(outputs))
        return done(args[0] if args else []) if all(getattr(each, "asyncOp", True) for each in args) else None

    return call


for _name in (*VERBS, *POINT_TO_POINT):
    setattr(Inner, _name, _verb(_name))


def _stock(self: NcclGroup, generation: int, _addresses: Addresses, *, replaced: bool) -> BuiltGroup:
    inner = Inner(self._store, self._rank, self._size, self._name, self._timeout)
    return BuiltGroup(generation, inner, [])


def _add_nccl(self: NcclGroup, inner: Any, store: Any) -> None:
    inner._given = store, *inner._given[1:]
    if self.index is not None:
        inner._connect()


NcclGroup._stock = _stock  # type: ignore[method-assign]
NcclGroup._add_nccl = _add_nccl  # type: ignore[method-assign]
torch.cuda.current_device = lambda: 0
torch.cuda.synchronize = lambda _device=None: None
torch.cuda.set_device = lambda _device: None
