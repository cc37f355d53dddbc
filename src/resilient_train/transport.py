"""Frames between a rank (or an operator's command) and the agent of its node, over a Unix socket.

A frame is a little-endian length of 4 bytes and a msgpack body of one of the structs of ``protocol/messages``. Only the
same user or root may connect (``SO_PEERCRED``). Descriptors travel beside a frame as ``SCM_RIGHTS``.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from resilient_train.errors import JobEnded, ProtocolError
from resilient_train.odd_text import escaped
from resilient_train.protocol.messages import FromAgent, FromRank

MAX_FRAME_BYTES = 256 << 20
Received = TypeVar("Received")
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding foreign bytes can raise: msgspec wraps neither bad UTF-8 nor too deep a nesting."""
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_MAX_DESCRIPTORS = 4
_BACKLOG = 1024


def encode(message: msgspec.Struct) -> bytes:
    """The message as one frame. Text that is not UTF-8 arrives escaped: what a program goes by is sent as bytes."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:
        body = _encoder.encode(escaped(message))
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} frame of {len(body)} bytes is over the limit")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes, decoder: msgspec.msgpack.Decoder[Received]) -> Received:
    """Raises ProtocolError for anything that ``decoder`` does not take."""
    try:
        return decoder.decode(body)
    except _MALFORMED as error:
        raise ProtocolError(f"not a frame of this protocol: {error}") from None


class FrameBuffer:
    """Cuts a byte stream into frame bodies. A length over ``limit_bytes`` raises ProtocolError: the stream is not ours,
    or its sender not entitled to so much.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._bytes = bytearray()
        self.limit_bytes = MAX_FRAME_BYTES if limit_bytes is None else limit_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Adds ``data`` and yields each body that is complete."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self.limit_bytes:
                raise ProtocolError(f"a frame claims {length} bytes")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield body


class Peer(NamedTuple):
    """The process at the other end, as the kernel knows it from when it connected (``SO_PEERCRED``)."""

    pid: int
    """0: of another namespace, where it can't be seen from here."""
    uid: int

    @property
    def trusted(self) -> bool:
        """Whether it runs as this user, or as root."""
        return self.uid in (0, os.geteuid())


def peer_of(connection: socket.socket) -> Peer:
    """Who has connected, or, at the connecting end, who listens."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", packed)
    return Peer(pid, uid)


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """The path of a socket by way of its folder's descriptor: a Unix socket's address has room for 107 bytes only."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


class Wire(Generic[Received]):
    """One end of a connection: frames both ways, each with descriptors if need be. One thread at a time.

    Raises what ``lost`` makes of a reason when the other end is gone.
    """

    def __init__(
        self,
        endpoint: socket.socket,
        decoder: msgspec.msgpack.Decoder[Received],
        lost: Callable[[str], Exception],
    ) -> None:
        self._socket = endpoint
        self._decoder = decoder
        self._lost = lost
        self._frames = FrameBuffer()
        self._ready: list[Received] = []
        self._descriptors: list[int] = []
        self._no_room = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Readable when ``receive`` has something to read."""
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Sends one frame; descriptors go with its first byte, and stay the caller's."""
        data = encode(message)
        try:
            if descriptors:
                data = data[socket.send_fds(self._socket, [data[:1]], list(descriptors)) :]
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(f"is gone ({error})") from None

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """The next frame, or None after ``timeout_s``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._selector.select(left):
                return None
            self._read()
        return self._ready.pop(0)

    def take_descriptors(self, count: int) -> list[int]:
        """The descriptors that came with the last frames, oldest first; the caller owns them. Raises OSError where this
        process had no room for them.
        """
        if len(self._descriptors) < count:
            if self._no_room:
                self._no_room = False
                raise OSError(errno.EMFILE, f"no room for {count} descriptors that were sent")
            raise ProtocolError(f"expected {count} descriptors, got {len(self._descriptors)}")
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return taken

    def _read(self) -> None:
        try:
            data, descriptors, whole = receive(self._socket)
        except OSError as error:
            raise self._lost(f"is gone ({error})") from None
        self._descriptors += descriptors
        self._no_room |= not whole
        if not data:
            raise self._lost("closed the connection")
        for body in self._frames.feed(data):
            self._ready.append(decode(body, self._decoder))

    def close(self) -> None:
        """Closes the connection; descriptors that nobody took are closed too. Idempotent."""
        self._selector.close()
        self._socket.close()
        while self._descriptors:  # once: by the next time the numbers may be others' files
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop())


def receive(endpoint: socket.socket) -> tuple[bytes, list[int], bool]:
    """What is there to read, with its descriptors, which no program that this process starts inherits; and whether this
    process had room for them. Where it had not, none are handed on: the kernel gives as many as there is room for, and
    those could be taken for others.

    Not ``socket.recv_fds``: Python 3.11's does not pass its flags on.
    """
    room = socket.CMSG_LEN(_MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, flags, _ = endpoint.recvmsg(1 << 18, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, packed in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(packed[: len(packed) - len(packed) % descriptors.itemsize])
    if flags & socket.MSG_CTRUNC:
        close_all(descriptors)
        return data, [], False
    return data, descriptors.tolist(), True


def close_all(descriptors: Iterable[int]) -> None:
    """Closes each."""
    for each in descriptors:
        os.close(each)


def listen(path: Path) -> socket.socket:
    """A Unix socket that listens at ``path``, for this user only. What lies there is taken away. Raises OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        # Nobody can connect before `listen`, so the mode is in force in time.
        with short_path(str(path)) as short:
            listener.bind(short)
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: str, timeout_s: float) -> socket.socket:
    """A connection to the Unix socket at ``path``, blocking. Raises OSError if nobody listens there."""
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        endpoint.settimeout(timeout_s)
        with short_path(path) as short:
            endpoint.connect(short)
        endpoint.settimeout(None)
    except OSError:
        endpoint.close()
        raise
    return endpoint


class Channel(Wire[FromAgent]):
    """The rank's (or operator's) end: blocking sends, and receives that also watch another descriptor.

    Raises JobEnded when the agent is gone, PermissionError if somebody else's process listens there.
    """

    def __init__(self, path: str, timeout_s: float = 30.0) -> None:
        endpoint = connect(path, timeout_s)
        self._peer = peer_of(endpoint)
        if not self._peer.trusted:
            endpoint.close()
            raise PermissionError(f"{path} belongs to a process of another user")
        super().__init__(endpoint, _from_agent, lambda reason: JobEnded(f"the agent of this node {reason}"))

    def put_back(self, frames: list[FromAgent]) -> None:
        """Frames that were received too early, to be received again before all others."""
        self._ready[:0] = frames

    def peer_is_stopped(self) -> bool:
        """Whether who listens there was stopped (SIGSTOP, a debugger), as far as that can be seen from here."""
        try:
            letter = Path(f"/proc/{self._peer.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False  # it is of another namespace, or gone, which is read next
        return letter in ("T", "t")

    def wait_either(self, other: int) -> bool:
        """Blocks until a frame is there (False) or descriptor ``other`` is readable (True)."""
        if self._ready:
            return False
        self._selector.register(other, selectors.EVENT_READ)
        try:
            events = self._selector.select()
        finally:
            self._selector.unregister(other)
        return any(key.fd == other for key, _ in events)
