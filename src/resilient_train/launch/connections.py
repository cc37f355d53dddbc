"""The agent's end of the Unix socket: accepts, cuts frames, sends without ever blocking the loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from resilient_train.errors import ProtocolError
from resilient_train.protocol.messages import FromAgent, FromRank, Hello
from resilient_train.transport import FrameBuffer, decode_from_rank, encode, peer_is_trusted, short_path

_CHUNK_BYTES = 1 << 18


class Connection:
    """One connected rank or operator; ``hello`` is its first frame."""

    def __init__(self, endpoint: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._socket = endpoint
        self._loop = loop
        self._frames = FrameBuffer()
        self._outgoing = bytearray()
        self.hello: Hello | None = None
        self.closed = False

    def send(self, message: FromAgent, descriptors: Sequence[int] = ()) -> None:
        """Sends a frame, as far as the socket takes it now; the rest follows when it can."""
        if self.closed:
            return
        data = encode(message)
        try:
            if descriptors:
                # Descriptors go with the first byte of their frame; ranks read so little that the buffer is empty here.
                sent = socket.send_fds(self._socket, [data[:1]], list(descriptors))
                data = data[sent:]
            self._outgoing += data
            self._flush()
        except BlockingIOError:
            self._outgoing += data
            self._loop.add_writer(self._socket, self._flush)
        except OSError:
            self.close()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                sent = self._socket.send(self._outgoing[:_CHUNK_BYTES])
                del self._outgoing[:sent]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            self.close()
            return
        self._loop.remove_writer(self._socket)

    def receive(self) -> list[FromRank] | None:
        """The frames that are there; None when the peer has hung up. Raises ProtocolError for foreign bytes."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        return [decode_from_rank(body) for body in self._frames.feed(data)]

    def close(self) -> None:
        """Closes; idempotent."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()


class Listener:
    """The socket ``agent-<node>.sock``. ``on_frame(connection, frame)`` is called for each frame."""

    def __init__(
        self,
        path: Path,
        on_frame: Callable[[Connection, FromRank], None],
        on_foreign: Callable[[str], None],
    ) -> None:
        self._path = path
        self._on_frame = on_frame
        self._on_foreign = on_foreign
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        with short_path(str(path)) as short:
            self._socket.bind(short)
        path.chmod(0o600)
        self._socket.listen(1024)
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                endpoint, _ = self._socket.accept()
                endpoint.setblocking(False)
                if not peer_is_trusted(endpoint):
                    endpoint.close()
                    self._on_foreign("a process of another user tried to connect")
                    continue
                connection = Connection(endpoint, self._loop)
                self._connections.add(connection)
                self._loop.add_reader(endpoint, self._read, connection)

    def _read(self, connection: Connection) -> None:
        try:
            frames = connection.receive()
        except ProtocolError as error:
            self._on_foreign(str(error))
            frames = None
        if frames is None:
            connection.close()
            self._connections.discard(connection)
            return
        for frame in frames:
            if connection.hello is None:
                if not isinstance(frame, Hello):
                    self._on_foreign(f"the first frame was {type(frame).__name__} instead of Hello")
                    connection.close()
                    return
                connection.hello = frame
            self._on_frame(connection, frame)

    def close(self) -> None:
        """Closes the socket and all connections."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._path.unlink(missing_ok=True)
        for connection in self._connections:
            connection.close()
