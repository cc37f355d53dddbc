"""The holder: one small process per node that owns the memory of snapshots, so that these outlive ranks and agents.

It creates sealed memfds, hands them out, counts pins, runs works (``state/vault/work.py``), and ends by itself when
its last member has been gone for the grace time. It imports no torch and no numpy, and maps no image but while it
works on one, so the kernel has little reason to choose it when memory runs out.

It leads a session of its own: what is meant for the job's process group does not reach it. SIGINT and SIGHUP it
ignores; SIGTERM (a scheduler ends the container) means to make haste: no grace time, but members and works are still
waited for. A client is gone when its process is: forked data loader workers keep its socket open for a while, so there
is a pidfd, too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import os
import queue
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resilient_train.errors import ProtocolError
from resilient_train.launch.holdings import Holdings, RefusedError, describe
from resilient_train.state.vault import frames, slots
from resilient_train.state.vault.client import socket_path
from resilient_train.state.vault.work import Pinned, Work, load, perform
from resilient_train.transport import Wire, peer_is_trusted, short_path

GRACE_S = 60.0
"""How long memory outlives the last process that knows of it: time for another launcher with the same run directory."""
FIRST_S = 30.0
"""How long the first member may take."""
_SEND_TIMEOUT_S = 1.0
_TIDY_S = 1.0
_CREDENTIALS = struct.Struct("3i")
_decoder: msgspec.msgpack.Decoder[frames.ToHolder] = msgspec.msgpack.Decoder(frames.ToHolder)


class _Client:
    """A connected process. Owner of its pins."""

    def __init__(self, endpoint: socket.socket) -> None:
        self.wire = Wire(endpoint, _decoder, ConnectionError)
        self.entered = self.member = False
        pid, _, _ = _CREDENTIALS.unpack(endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        self.pid: int = pid
        # 0: a process of another namespace, of which the end of its connection tells.
        self.pidfd = os.pidfd_open(pid) if pid else -1

    def close(self) -> None:
        self.wire.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class _Errand:
    """Work that was submitted. Owner of the pins of its snapshots."""

    def __init__(self, client: _Client, order: frames.Submit, work: Work) -> None:
        self.client = client
        self.order = order
        self.work = work
        self.pinned: list[Pinned] = []
        self.result = frames.Result(order.number, b"", "")

    def run(self) -> None:
        try:
            value = perform(self.work, self.pinned, self.order.argument)
        except Exception as error:  # a work's own failure is its client's to know; the holder goes on
            self.fail(f"{self.order.work} failed: {type(error).__name__}: {error}")
        else:
            self.result = frames.Result(self.order.number, value, "")

    def fail(self, reason: str) -> None:
        self.result = frames.Result(self.order.number, b"", reason)


class Holder:
    """Everything runs in the calling thread, but works."""

    def __init__(
        self,
        listener: socket.socket,
        works: Mapping[str, Work],
        *,
        grace_s: float = GRACE_S,
        first_s: float = FIRST_S,
        holdings: Holdings | None = None,
    ) -> None:
        self._listener = listener
        self._works = works
        self._grace_s = grace_s
        self._hurry = self._finished = False
        self._holdings = holdings or Holdings()
        self._clients: set[_Client] = set()
        self._alone_until_s: float | None = time.monotonic() + first_s
        self._under_way = 0
        self._errands: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        self._over: collections.deque[_Errand] = collections.deque()
        self._bell, self._bell_end = socket.socketpair()
        for end in (self._bell, self._bell_end):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        threading.Thread(target=self._work, name="rt-works", daemon=True).start()

    def hurry(self) -> None:
        """No grace time from now on."""
        self._hurry = True

    def bell(self) -> int:
        """A descriptor; a byte written to it makes ``run`` look again."""
        return self._bell_end.fileno()

    def run(self) -> None:
        """Returns when nobody needs the holder any more."""
        while True:
            may_end = self._may_end()
            events = self._selector.select(0.0 if may_end else self._patience_s())
            if may_end and not events:  # with nobody at the door, either
                return
            for key, _ in events:
                key.data()
            if self._holdings.outgrown():
                self._holdings.drop_superseded()

    def _may_end(self) -> bool:
        if self._alone_until_s is None or self._under_way:
            return False
        return self._hurry or time.monotonic() >= self._alone_until_s

    def _patience_s(self) -> float | None:
        alone_s = None if self._alone_until_s is None else max(0.0, self._alone_until_s - time.monotonic())
        if self._under_way and alone_s == 0.0:
            alone_s = None  # the work's end rings the bell
        return _TIDY_S if self._holdings.outgrown() and (alone_s is None or alone_s > _TIDY_S) else alone_s

    def _accept(self) -> None:
        endpoint, _ = self._listener.accept()
        if not peer_is_trusted(endpoint):
            endpoint.close()
            _say("a process of another user tried to connect")
            return
        endpoint.settimeout(_SEND_TIMEOUT_S)
        try:
            client = _Client(endpoint)
        except ProcessLookupError:  # it is dead already
            endpoint.close()
            return
        self._clients.add(client)
        self._selector.register(client.wire, selectors.EVENT_READ, lambda: self._read(client))
        if client.pidfd >= 0:
            self._selector.register(client.pidfd, selectors.EVENT_READ, lambda: self._let_go(client))

    def _read(self, client: _Client) -> None:
        if client not in self._clients:  # let go earlier in this round
            return
        try:
            while (frame := client.wire.receive(0)) is not None:
                self._answer(client, frame)
        except ConnectionError:
            self._let_go(client)
        except ProtocolError as error:
            _say(f"process {client.pid}: {error}")
            self._let_go(client)

    def _answer(self, client: _Client, frame: frames.ToHolder) -> None:
        if isinstance(frame, frames.Enter):
            self._enter(client, frame)
            return
        if not client.entered:
            raise ProtocolError(f"the first frame was {type(frame).__name__} instead of Enter")
        if isinstance(frame, frames.Submit):
            self._submit(client, frame)
            return
        try:
            reply, descriptors = self._handle(client, frame)
        except RefusedError as refused:
            reply, descriptors = refused.frame, []
        client.wire.send(reply, descriptors)

    def _enter(self, client: _Client, frame: frames.Enter) -> None:
        if frame.version != frames.VERSION:
            raise ProtocolError(f"speaks version {frame.version} of these frames, the holder {frames.VERSION}")
        client.entered, client.member = True, frame.member
        if frame.member:
            self._alone_until_s = None
            self._finished = False  # the run goes on after all
        client.wire.send(frames.Done())

    def _handle(self, client: _Client, frame: frames.ToHolder) -> tuple[frames.FromHolder, list[int]]:
        held = self._holdings
        match frame:
            case frames.Reserve(rank, image_bytes):
                return _stores([held.reserve(rank, image_bytes)], held.sequence(rank))
            case frames.Open(rank):
                return _stores(held.of(rank), held.sequence(rank))
            case frames.Adopt():
                (fd,) = client.wire.take_descriptors(1)
                held.adopt(fd)
            case frames.Pin(rank, sequence):
                held.pin(client, rank, sequence)
            case frames.Unpin(rank, sequence):
                held.unpin(client, rank, sequence)
            case frames.Drop(rank):
                held.drop(rank)
            case frames.Ask():
                members = sum(each.member for each in self._clients)
                return frames.Inventory(os.getpid(), held.describe(), members, self._under_way), []
            case frames.Finish():
                self._finished = True
        return frames.Done(), []

    def _submit(self, client: _Client, order: frames.Submit) -> None:
        work = self._works.get(order.work)
        if work is None:
            reason = f"this holder knows no work {order.work!r}, but {sorted(self._works)}"
            client.wire.send(frames.Result(order.number, b"", reason))
            return
        errand = _Errand(client, order, work)
        try:
            for rank, sequence in order.snapshots:
                errand.pinned.append(self._holdings.pin(errand, rank, sequence))
        except RefusedError as refused:
            self._holdings.release_all(errand)
            client.wire.send(frames.Result(order.number, b"", refused.frame.text))
            return
        self._under_way += 1
        self._errands.put(errand)

    def _work(self) -> None:
        while True:
            errand = self._errands.get()
            errand.run()
            self._over.append(errand)
            with contextlib.suppress(BlockingIOError):  # full of rings already
                self._bell_end.send(b"w")

    def _on_bell(self) -> None:
        self._bell.recv(4096)
        while self._over:
            errand = self._over.popleft()
            self._under_way -= 1
            self._holdings.release_all(errand)
            if errand.result.error:
                _say(errand.result.error)
            if errand.client in self._clients:
                try:
                    errand.client.wire.send(errand.result)
                except ConnectionError:
                    self._let_go(errand.client)

    def _let_go(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.wire)
        if client.pidfd >= 0:
            self._selector.unregister(client.pidfd)
        client.close()
        self._holdings.release_all(client)
        if client.member and not any(each.member for each in self._clients):
            self._alone_until_s = time.monotonic() + (0.0 if self._finished else self._grace_s)


def _stores(stores: Sequence[slots.Control], sequence: int) -> tuple[frames.Stores, list[int]]:
    return frames.Stores(tuple(map(describe, stores)), sequence), [store.fd for store in stores]


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} holder {os.getpid()}: {text}", file=sys.stderr, flush=True)


def listen(path: Path) -> socket.socket | None:
    """The socket of the run's one holder on this node; None if there is one already. The lock is kept until we end."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    path.unlink(missing_ok=True)  # of a holder that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with short_path(str(path)) as short:
        listener.bind(short)
    path.chmod(0o600)
    listener.listen(1024)
    return listener


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m resilient_train.launch.holder RUN_DIR``; see ``holding.ensure_holder``."""
    parser = argparse.ArgumentParser(prog="resilient_train.launch.holder")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--first-s", type=float, default=FIRST_S)
    parser.add_argument("--work", action="append", default=[], metavar="NAME=MODULE:FUNCTION")
    parser.add_argument("--ready-fd", type=int, default=-1)
    options = parser.parse_args(arguments)
    path = socket_path(options.run_dir.absolute(), options.node)
    listener = listen(path)
    if listener is None:
        return 0
    os.chdir("/")  # so as not to keep a file system busy that others want to unmount
    holder = Holder(listener, dict(map(load, options.work)), grace_s=options.grace_s, first_s=options.first_s)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: holder.hurry())
    signal.set_wakeup_fd(holder.bell(), warn_on_full_buffer=False)
    if options.ready_fd >= 0:
        os.write(options.ready_fd, b"r")
        os.close(options.ready_fd)
    try:
        holder.run()
    finally:
        path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
