"""The listening end of a Unix socket, of the agent's and the holder's: accepts, cuts frames, sends, and never waits.

No peer can harm more than itself. Who is another user's is shut out at once; who has not said its greeting may take up
little room, and not for long; who does not read what it is sent is dropped. Where descriptors or memory run out, nobody
is accepted for a while, and those who are connected notice nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple

import msgspec

from resilient_train.errors import ProtocolError
from resilient_train.transport import (
    MAX_FRAME_BYTES,
    FrameBuffer,
    Peer,
    Received,
    close_all,
    decode,
    encode,
    listen,
    peer_of,
    receive,
)

_CHUNK_BYTES = 1 << 18
_ACCEPTED_AT_ONCE = 64
_PAUSE_S = 1.0
_GREETING_BYTES = 64 << 10
_GREETING_S = 10.0
_SILENT_MAX = 64
"""Connections without a greeting; of more than these the oldest is closed."""
_LATE = "it has not said who it is"


class ReadLimits(NamedTuple):
    """What a peer may take up here: the largest frame it may send, and how much may wait for it to read."""

    frame_bytes: int
    waiting_bytes: int


SMALL = ReadLimits(1 << 20, 16 << 20)
LARGE = ReadLimits(MAX_FRAME_BYTES, MAX_FRAME_BYTES + (16 << 20))
"""For a rank: one frame of the largest kind (a description of a state) passes, in either direction."""


class Connection(Generic[Received]):
    """One connected process."""

    def __init__(
        self,
        endpoint: socket.socket,
        peer: Peer,
        decoder: msgspec.msgpack.Decoder[Received],
        gone: Callable[[str], None],
    ) -> None:
        """``gone`` is told why, when the connection is closed from in here."""
        self.peer = peer
        self.greeting: Received | None = None
        self.closed = False
        self._socket = endpoint
        self._decoder = decoder
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer(_GREETING_BYTES)
        self._descriptors: list[int] = []
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        """The unsent rest of each frame, and copies of the descriptors that go with its first byte."""
        self._waiting_bytes = 0
        self._waiting_max_bytes = _GREETING_BYTES

    def admit(self, room: ReadLimits) -> None:
        """The peer is known: it may take up that much from now on."""
        self._frames.limit_bytes, self._waiting_max_bytes = room

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Sends a frame, as far as the socket takes it now; the rest follows when it can. Descriptors stay the
        caller's.
        """
        if self.closed:
            return
        data = memoryview(encode(message))
        rest = data if self._outgoing else data[self._write(data, descriptors) :]
        if not rest:
            return
        try:
            copies = [os.dup(each) for each in descriptors if len(rest) == len(data)]
        except OSError as error:
            self._gone(f"what it asked for can't be sent: {error}")
        else:
            self._put_off(rest, copies)

    def _put_off(self, rest: memoryview, descriptors: list[int]) -> None:
        self._outgoing.append((rest, descriptors))
        self._waiting_bytes += len(rest)
        if self._waiting_bytes > self._waiting_max_bytes:
            self._gone(f"it does not read: {self._waiting_bytes} bytes wait for it")
        elif len(self._outgoing) == 1:
            self._loop.add_writer(self._socket, self._flush)

    def _flush(self) -> None:
        while self._outgoing and not self.closed:
            rest, descriptors = self._outgoing.popleft()
            sent = self._write(rest, descriptors)
            self._waiting_bytes -= sent
            if sent:
                close_all(descriptors)
            if sent < len(rest):
                self._outgoing.appendleft((rest[sent:], [] if sent else descriptors))
                return
        if not self.closed:
            self._loop.remove_writer(self._socket)

    def _write(self, data: memoryview, descriptors: Sequence[int]) -> int:
        """How much the socket takes now; descriptors go with its first byte. All, where the peer has hung up: that is
        read next.
        """
        sent = 0
        try:
            if descriptors:
                sent = socket.send_fds(self._socket, [data[:1]], list(descriptors))
            while sent < len(data):
                sent += self._socket.send(data[sent : sent + _CHUNK_BYTES])
        except BlockingIOError:
            return sent
        except (BrokenPipeError, ConnectionResetError):
            return len(data)
        except OSError as error:
            self._gone(f"nothing can be sent to it: {error}")
            return len(data)
        return sent

    def receive(self) -> list[Received] | None:
        """The frames that are there; None when the peer has hung up. Raises ProtocolError for foreign bytes."""
        try:
            data, descriptors, _ = receive(self._socket)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self._descriptors += descriptors
        if not data:
            return None
        return [decode(body, self._decoder) for body in self._frames.feed(data)]

    def take_descriptor(self) -> int:
        """The oldest descriptor that has come and was not taken; the caller owns it. Raises ProtocolError."""
        if not self._descriptors:
            raise ProtocolError("a descriptor was to come along, and has not")
        return self._descriptors.pop(0)

    def refuse_descriptors(self) -> None:
        """Closes what has come along and nobody asked for."""
        close_all(self._descriptors)
        self._descriptors = []

    def close(self) -> None:
        """Closes; idempotent."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self.refuse_descriptors()
            for _, descriptors in self._outgoing:
                close_all(descriptors)
            self._outgoing.clear()


class Server(Generic[Received]):
    """Whoever is behind a listening socket. Frames and ends of connections come one after the other."""

    decoder: msgspec.msgpack.Decoder[Received]
    greeting: type[Received]
    """What the first frame on a connection must be."""
    takes_descriptors = False

    def on_open(self, connection: Connection[Received]) -> None:
        """Somebody has connected. Raises OSError if there is no room for it."""

    def on_frame(self, connection: Connection[Received], frame: Received) -> None:
        """A frame has come. Raises ProtocolError if it should not have: the connection is closed then."""
        raise NotImplementedError

    def on_close(self, connection: Connection[Received]) -> None:
        """The connection is closed."""

    def on_foreign(self, connection: Connection[Received] | None, text: str) -> None:
        """Something came that is none of ours, or nobody can be let in; for people."""
        raise NotImplementedError

    def on_short(self, error: OSError, tries: int) -> None:
        """Descriptors or memory have run out, and whoever comes has to wait. With each try to let one in, about a
        second apart, until one succeeds.
        """
        if tries == 1:
            self.on_foreign(None, f"nobody can connect for now: {error}")


class Listener(Generic[Received]):
    """A socket at a path, and its connections."""

    def __init__(self, path: Path, server: Server[Received], listener: socket.socket, connections_max: int) -> None:
        """``listener``: the socket that ``transport.listen`` has made at ``path``."""
        self._path = path
        self._server = server
        self._connections_max = connections_max
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection[Received]] = set()
        self._silent: dict[Connection[Received], asyncio.TimerHandle] = {}
        self._resume: asyncio.TimerHandle | None = None
        self._failures = 0
        """Of letting somebody in, since it last succeeded."""
        self._begin(listener)

    def _begin(self, listener: socket.socket) -> None:
        self._socket = listener
        self._identity = _identity(self._path)
        self._loop.add_reader(listener, self._accept)

    def restore(self) -> None:
        """Makes the socket anew if it is not at its path any more: somebody has tidied up. Raises OSError."""
        if _identity(self._path) == self._identity:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = listen(self._path)
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._begin(fresh)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                endpoint, _ = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no descriptors, no memory: of this process, or of the machine
                self._pause(error)
                return
            endpoint.setblocking(False)
            try:
                self._let_in(endpoint)
            except ProcessLookupError:  # it is dead already
                endpoint.close()
            except OSError as error:
                endpoint.close()
                self._pause(error)
                return
            self._failures = 0
            self._make_room()

    def _pause(self, error: OSError) -> None:
        """The socket stays readable, so the loop would turn in circles."""
        self._failures += 1
        self._server.on_short(error, self._failures)
        self._loop.remove_reader(self._socket)
        self._resume = self._loop.call_later(_PAUSE_S, lambda: self._loop.add_reader(self._socket, self._accept))

    def _let_in(self, endpoint: socket.socket) -> None:
        peer = peer_of(endpoint)
        if not peer.trusted or len(self._connections) >= self._connections_max:
            endpoint.close()
            why = "a process of another user tried to connect" if not peer.trusted else "too many connections"
            self._server.on_foreign(None, why)
            return
        connection = Connection(endpoint, peer, self._server.decoder, lambda why: self.drop(connection, why))
        self._server.on_open(connection)
        self._loop.add_reader(endpoint, self._read, connection)
        self._connections.add(connection)
        self._silent[connection] = self._loop.call_later(_GREETING_S, self.drop, connection, _LATE)

    def _make_room(self) -> None:
        """Unless the oldest has said who it is, and we have not listened: this process may have been stopped while many
        connected, and accepts them all before it reads.
        """
        if len(self._silent) <= _SILENT_MAX:
            return
        oldest = next(iter(self._silent))
        self._read(oldest)
        if oldest in self._silent:
            self.drop(oldest, _LATE)

    def _read(self, connection: Connection[Received]) -> None:
        try:
            frames = connection.receive()
            if frames is None:
                self.drop(connection)
                return
            for frame in frames:
                if connection.closed:
                    return
                self._take(connection, frame)
            if not self._server.takes_descriptors:
                connection.refuse_descriptors()
        except ProtocolError as error:
            self.drop(connection, str(error))

    def _take(self, connection: Connection[Received], frame: Received) -> None:
        if connection.greeting is None:
            if not isinstance(frame, self._server.greeting):
                expected = self._server.greeting.__name__
                raise ProtocolError(f"the first frame was {type(frame).__name__} instead of {expected}")
            connection.greeting = frame
            self._silent.pop(connection).cancel()
        self._server.on_frame(connection, frame)

    def drop(self, connection: Connection[Received], why: str = "") -> None:
        """Closes a connection. Idempotent. ``why`` is empty where that is as it should be."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        timer = self._silent.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if why:
            self._server.on_foreign(connection, why)
        connection.close()
        self._server.on_close(connection)

    def close(self) -> None:
        """Closes the socket and all connections. What lies at the path by now may be another one's."""
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if _identity(self._path) == self._identity:
            with contextlib.suppress(OSError):  # the file system may be read-only by now
                self._path.unlink()
        for connection in tuple(self._connections):
            self.drop(connection)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns  # numbers of files are soon used again
