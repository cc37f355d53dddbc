"""The holder: one small process per node that owns the memory of snapshots, so that these outlive ranks and agents.

It creates sealed memfds, hands them out, counts pins, runs works (``state/vault/holder_work.py``), and ends by itself
when its last member has been gone for the grace time, once the last work is done that it was left with (what is in
memory goes to storage). It imports no torch and no numpy, and maps no image but while it works on one, so the kernel
has little reason to choose it when memory runs out.

It leads a session of its own: what is meant for the job's process group does not reach it. SIGINT, SIGHUP and
SIGUSR1 it ignores; SIGTERM (a scheduler ends the container) means to make haste: no grace time, but members and works
are still waited for. A client is gone when its process is: forked data loader workers keep its socket open for a while,
so there is a pidfd, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resilient_train.descriptors import raise_limit
from resilient_train.errors import ProtocolError
from resilient_train.state.vault import frames, slots
from resilient_train.state.vault.client import common_commits, lock_of, snapshots_at, socket_path
from resilient_train.state.vault.holder_work import Pinned, Work, load, perform
from resilient_train.state.vault.snapshot_index import RefusedError, SnapshotIndex, describe
from resilient_train.transport import listen
from resilient_train.unix_listener import SMALL, Connection, Listener, Server

GRACE_S = 60.0
"""How long memory outlives the last process that knows of it: time for another launcher with the same run directory."""
LAST_TRIES = 60
"""How often the last work is tried, with the grace time in between: storage that is full may be made free."""
FIRST_S = 30.0
"""How long the first member may take."""
_TIDY_S = 1.0
_CONNECTIONS_MAX = 4096

_NOTHING = frames.LastWork("", 0, b"", "")

_Client = Connection[frames.ToHolder]


class _Errand:
    """Work that was submitted. Owner of the pins of its snapshots."""

    def __init__(self, client: _Client | None, order: frames.Submit, work: Work) -> None:
        """``client``: None where nobody is told."""
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


class Holder(Server[frames.ToHolder]):
    """Everything runs in the event loop's thread, but works. A connection is the owner of its pins."""

    decoder = msgspec.msgpack.Decoder(frames.ToHolder)
    greeting = frames.Attach
    takes_descriptors = True

    def __init__(
        self,
        works: Mapping[str, Work],
        *,
        grace_s: float = GRACE_S,
        first_s: float = FIRST_S,
        holdings: SnapshotIndex | None = None,
    ) -> None:
        self._works = works
        self._grace_s = grace_s
        self._hurry = self._finished = False
        self._last = self._tried = _NOTHING
        self._tries = 0
        self._is_in_place: Callable[[], bool] = lambda: True
        self._mark: Callable[[], None] = lambda: None
        self._index = holdings or SnapshotIndex()
        self._members: set[_Client] = set()
        self._pidfds: dict[_Client, int] = {}
        self._alone_until_s: float | None = time.monotonic() + first_s
        self._under_way = 0
        self._errands: queue.SimpleQueue[_Errand] = queue.SimpleQueue()

    async def run(self, path: Path, claimed: Claimed, ready: Callable[[], None]) -> None:
        """Returns when nobody needs the holder any more. It listens at ``path``; ``ready`` is called once."""
        self._is_in_place = lambda: claimed.is_in_place(path)
        self._mark = claimed.mark
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_on_bug)
        self._loop.add_signal_handler(signal.SIGTERM, self._make_haste)
        self._news = asyncio.Event()
        threading.Thread(target=self._work, name="rt-works", daemon=True).start()
        self._listener = Listener(path, self, claimed.listener, _CONNECTIONS_MAX)
        ready()
        try:
            while not (self._may_end() and await self._nobody_at_the_door()) or self._begin_last():
                await self._wait()
        finally:
            self._listener.close()

    def _make_haste(self) -> None:
        """No grace time from now on."""
        self._hurry = True
        self._news.set()

    def _may_end(self) -> bool:
        if self._alone_until_s is None or self._under_way:
            return False
        return self._hurry or time.monotonic() >= self._alone_until_s

    def _begin_last(self) -> bool:
        """The last work, if there is any to do."""
        last, self._last = self._last, _NOTHING
        if self._finished or not last.work:
            return False
        if not self._is_in_place():
            _say("what is in memory is given up: the run directory is gone, or another one has its name")
            return False
        if not _is_free(last.unless):
            _say("what is in memory is given up: another launcher has begun from something else")
            return False
        commits, snapshots = self._newest_of_all(last.world, last.until)
        if snapshots:
            _say(f"nobody has come for what is in memory: {last.work}, of update {commits}")
            self._tried, self._tries = last, self._tries + 1
            self._submit(None, frames.Submit(0, last.work, snapshots, last.argument))
        return self._under_way > 0

    def _newest_of_all(self, world: int, until: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The newest update before which all ranks have a snapshot, and these."""
        stores = self._index.describe()
        commits = next(iter(common_commits(stores, world, until)), -1)
        held = snapshots_at(stores, world, commits)
        return commits, tuple(sorted((rank, each.sequence) for rank, each in held.items()))

    def _do_last(self, client: _Client, asked: frames.DoLastWork) -> None:
        last, commits = self._last, -1
        snapshots: tuple[tuple[int, int], ...] = ()
        if last.work and self._is_in_place():
            known = [until for until in (last.until, asked.until) if until >= 0]
            commits, snapshots = self._newest_of_all(last.world, min(known, default=-1))
        order = frames.Submit(asked.number, last.work, snapshots, last.argument)
        if snapshots:
            _say(f"process {client.peer.pid} asks for what is in memory: {last.work}, of update {commits}")
            self._submit(client, order)
        else:
            self._refuse(client, order, "its job has not said how, or not all of it is there")

    async def _nobody_at_the_door(self) -> bool:
        self._news.clear()
        for _ in range(3):  # a turn of the loop to accept, one to read, one for what follows
            await asyncio.sleep(0)
        return not self._news.is_set()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), self._patience_s())
        self._news.clear()
        if self._index.outgrown():
            self._loop.call_soon(self._index.drop_superseded)

    def _patience_s(self) -> float | None:
        alone_s = None if self._alone_until_s is None else max(0.0, self._alone_until_s - time.monotonic())
        if self._under_way and alone_s == 0.0:
            alone_s = None  # the work's end is news
        return _TIDY_S if self._index.outgrown() and (alone_s is None or alone_s > _TIDY_S) else alone_s

    # -- clients

    def on_open(self, connection: _Client) -> None:
        # Forks of a client (data loader workers) keep its socket open for a while: its process tells better.
        if connection.peer.pid:  # else it is of another namespace, and the end of its connection must do
            pidfd = os.pidfd_open(connection.peer.pid)
            self._pidfds[connection] = pidfd
            self._loop.add_reader(pidfd, self._drop, connection)
        self._news.set()

    def _drop(self, connection: _Client) -> None:
        self._listener.drop(connection)

    def on_close(self, connection: _Client) -> None:
        pidfd = self._pidfds.pop(connection, -1)
        if pidfd >= 0:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._index.release_all(connection)
        if connection in self._members:
            self._members.remove(connection)
            if not self._members:
                self._alone_until_s = time.monotonic() + (0.0 if self._finished else self._grace_s)
        self._news.set()

    def on_foreign(self, connection: _Client | None, text: str) -> None:
        _say(text if connection is None else f"process {connection.peer.pid}: {text}")

    def on_frame(self, connection: _Client, frame: frames.ToHolder) -> None:
        self._news.set()
        if isinstance(frame, frames.Attach):
            self._enter(connection, frame)
            return
        if isinstance(frame, frames.Submit):
            self._submit(connection, frame)
            return
        if isinstance(frame, frames.DoLastWork):
            self._do_last(connection, frame)
            return
        try:
            reply, descriptors = self._handle(connection, frame)
        except RefusedError as refused:
            reply, descriptors = refused.frame, []
        connection.send(reply, descriptors)

    def _enter(self, client: _Client, frame: frames.Attach) -> None:
        if frame.version != frames.VERSION:
            raise ProtocolError(f"speaks version {frame.version} of these frames, the holder {frames.VERSION}")
        client.admit(SMALL)
        if frame.member:
            self._members.add(client)
            self._alone_until_s = None
            self._finished = False  # the run goes on after all
        client.send(frames.Acknowledged())

    def _handle(self, client: _Client, frame: frames.ToHolder) -> tuple[frames.FromHolder, list[int]]:
        held = self._index
        match frame:
            case frames.ReserveStore(rank, image_bytes):
                return _stores([held.reserve(rank, image_bytes)], held.sequence(rank))
            case frames.OpenStores(rank):
                return _stores(held.of(rank), held.sequence(rank))
            case frames.Adopt():
                held.adopt(client.take_descriptor())
            case frames.Pin(rank, sequence):
                held.pin(client, rank, sequence)
            case frames.Unpin(rank, sequence):
                held.unpin(client, rank, sequence)
            case frames.Drop(rank):
                held.drop(rank)
            case frames.AskInventory():
                last = self._last if self._last.work else None
                return frames.Inventory(os.getpid(), held.describe(), len(self._members), self._under_way, last), []
            case frames.LastWork():
                self._last, self._tries = frame, 0
                if frame.work:
                    self._mark()
            case frames.JobOver():
                self._finished = True
        return frames.Acknowledged(), []

    # -- works

    def _submit(self, client: _Client | None, order: frames.Submit) -> None:
        work = self._works.get(order.work)
        if work is None:
            self._refuse(client, order, f"this holder knows no work {order.work!r}, but {sorted(self._works)}")
            return
        errand = _Errand(client, order, work)
        try:
            for rank, sequence in order.snapshots:
                errand.pinned.append(self._index.pin(errand, rank, sequence))
        except RefusedError as refused:
            self._index.release_all(errand)
            self._refuse(client, order, refused.frame.text)
            return
        self._under_way += 1
        self._errands.put(errand)

    def _refuse(self, client: _Client | None, order: frames.Submit, reason: str) -> None:
        if client is None:
            _say(reason)
        else:
            client.send(frames.Result(order.number, b"", reason))

    def _work(self) -> None:
        while True:
            errand = self._errands.get()
            errand.run()
            self._loop.call_soon_threadsafe(self._on_over, errand)

    def _on_over(self, errand: _Errand) -> None:
        self._under_way -= 1
        self._index.release_all(errand)
        if errand.result.error:
            _say(errand.result.error)
        if errand.client is not None:
            errand.client.send(errand.result)
        else:
            self._on_last_over(errand.result.error)
        self._news.set()

    def _on_last_over(self, error: str) -> None:
        """Another launcher may have come meanwhile, and have left the holder with something else, or with nothing."""
        if not error or self._hurry or self._tries == LAST_TRIES or self._last is not _NOTHING:
            return
        self._last = self._tried
        _say(f"it stays in memory, and is tried {LAST_TRIES - self._tries} times more, every {self._grace_s:g} s")
        if self._alone_until_s is not None:
            self._alone_until_s = time.monotonic() + self._grace_s


def _stores(stores: Sequence[slots.Control], sequence: int) -> tuple[frames.Stores, list[int]]:
    return frames.Stores(tuple(map(describe, stores)), sequence), [store.fd for store in stores]


def _say(text: str) -> None:
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} holder {os.getpid()}: {text}\n"
    with contextlib.suppress(OSError):  # the disk that its log is on is full, say: it holds memory all the same
        os.write(2, line.encode(errors="replace"))


def _on_bug(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A mistake of ours costs whom it hits. What is held stays held."""
    _say(f"internal error (please report it): {context['message']}: {context.get('exception')!r}")


def _is_free(lock: str) -> bool:
    """Whether that file is there, and nobody has a lock on it."""
    try:
        with Path(lock).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class Claimed(NamedTuple):
    """The socket of the run's one holder on this node, and its lock, which is kept until we end."""

    listener: socket.socket
    lock: int

    def is_in_place(self, path: Path) -> bool:
        """Whether the run directory is still the one: another job may have one by that name."""
        try:
            return os.path.samestat(os.fstat(self.lock), lock_of(path).stat())
        except OSError:
            return False

    def mark(self) -> None:
        """All ranks' state is in memory, and this was its holder: see ``client.was_held``."""
        os.utime(self.lock)


def claim(path: Path) -> Claimed | None:
    """None if there is a holder already."""
    lock = os.open(lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    os.utime(lock, (0, 0))  # nothing is held yet: see ``Claimed.mark``
    return Claimed(listen(path), lock)  # in place of that of a holder that was killed


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m resilient_train.state.vault.holder RUN_DIR``; see ``holder_search.find_holder``."""
    parser = argparse.ArgumentParser(prog="resilient_train.state.vault.holder")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--first-s", type=float, default=FIRST_S)
    parser.add_argument("--work", action="append", default=[], metavar="NAME=MODULE:FUNCTION")
    parser.add_argument("--ready-fd", type=int, default=-1)
    options = parser.parse_args(arguments)
    path = socket_path(options.run_dir.absolute(), options.node)
    claimed = claim(path)
    if claimed is None:
        return 0
    raise_limit()
    os.chdir("/")  # so as not to keep a file system busy that others want to unmount
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    holder = Holder(dict(map(load, options.work)), grace_s=options.grace_s, first_s=options.first_s)

    def ready() -> None:
        if options.ready_fd >= 0:
            with contextlib.suppress(BrokenPipeError):  # who has started us is gone, and nobody may come
                os.write(options.ready_fd, b"r")
            os.close(options.ready_fd)

    asyncio.run(holder.run(path, claimed, ready))
    return 0


if __name__ == "__main__":
    sys.exit(main())
