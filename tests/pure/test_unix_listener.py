"""The listening end: whatever a peer does, or the machine lacks, costs nobody else anything."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from resilient_train import unix_listener as module
from resilient_train.transport import FrameBuffer, encode, listen
from resilient_train.unix_listener import LARGE, SMALL, Connection, Listener, ReadLimits, Server

PATIENCE_S = 20.0


class Hello(msgspec.Struct, tag=True, frozen=True):
    pass


class Give(msgspec.Struct, tag=True, frozen=True):
    """Answered with as many bytes, and with a descriptor."""

    size: int
    descriptor: bool = False


class Data(msgspec.Struct, tag=True, frozen=True):
    data: bytes


Frame = Hello | Give | Data


class Echo(Server[Frame]):
    decoder = msgspec.msgpack.Decoder(Frame)
    greeting = Hello

    def __init__(self, room: ReadLimits = SMALL) -> None:
        self.room = room
        self.told: list[str] = []
        self.opened = 0
        self.closed = 0
        self.fails = 0
        self.received = 0

    def on_open(self, connection: Connection[Frame]) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError(errno.EMFILE, "no descriptor for its process")
        self.opened += 1

    def on_frame(self, connection: Connection[Frame], frame: Frame) -> None:
        match frame:
            case Hello():
                connection.admit(self.room)
                connection.send(Hello())
            case Give(size=size, descriptor=descriptor):
                readable, writable = os.pipe()
                os.write(writable, b"it came")
                connection.send(Data(bytes(size)), [readable] if descriptor else [])
                os.close(readable)
                os.close(writable)
            case Data(data=data):
                self.received = len(data)
                connection.send(Hello())

    def on_close(self, connection: Connection[Frame]) -> None:
        self.closed += 1

    def on_foreign(self, connection: Connection[Frame] | None, text: str) -> None:
        self.told.append(text)


class Client:
    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.socket.setblocking(False)
        self.frames = FrameBuffer()

    async def send(self, frame: msgspec.Struct) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, encode(frame))

    async def receive(self) -> Frame | None:
        """None: it has been hung up on."""
        while True:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, 1 << 20), PATIENCE_S)
            if not data:
                return None
            for body in self.frames.feed(data):
                return msgspec.msgpack.decode(body, type=Frame)

    async def greet(self) -> None:
        await self.send(Hello())
        assert await self.receive() == Hello()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)


def served(
    tmp_path: Path, server: Echo, story: Callable[[Listener[Frame], Path], Awaitable[None]], **limits: int
) -> None:
    async def tell() -> None:
        path = tmp_path / "socket"
        listener = Listener(path, server, listen(path), limits.get("connections_max", 1000))
        try:
            await story(listener, path)
        finally:
            listener.close()
        assert not path.exists()

    asyncio.run(tell())


class Poor(socket.socket):
    """Accepts nobody for a while."""

    failures = 3

    def accept(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_descriptors_nobody_is_let_in_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.02)
    server = Echo()

    async def story(listener: Listener[Frame], path: Path) -> None:
        first = Client(path)
        await first.greet()
        poor = Poor(fileno=listener._socket.detach())
        listener._loop.remove_reader(poor.fileno())
        listener._begin(poor)
        second = Client(path)
        await until(lambda: poor.failures == 1)
        await first.send(Give(10))
        assert await first.receive() == Data(bytes(10)), "who is in notices nothing"
        await second.greet()
        server.fails = 2
        third = Client(path)
        assert await third.receive() is None, "there was one for its connection, but none for its process"
        await Client(path).send(Hello())
        await until(lambda: server.fails == 0)
        await Client(path).greet()

    served(tmp_path, server, story)
    assert [text for text in server.told if "nobody can connect" in text] == server.told
    assert 2 <= len(server.told) <= 3, "once for each time that it begins"


def test_who_does_not_read_is_dropped(tmp_path: Path) -> None:
    server = Echo()

    async def story(_: Listener[Frame], path: Path) -> None:
        deaf, other = Client(path), Client(path)
        await deaf.greet()
        await other.greet()
        for _ in range(40):
            await deaf.send(Give(1 << 20))
        await until(lambda: server.closed == 1)
        await other.send(Give(1 << 20))
        assert await other.receive() == Data(bytes(1 << 20))

    served(tmp_path, server, story)
    assert "it does not read" in server.told[0]


def test_a_ranks_own_big_frames_pass_and_no_others(tmp_path: Path) -> None:
    size = 40 << 20
    server = Echo(LARGE)

    async def story(_: Listener[Frame], path: Path) -> None:
        rank = Client(path)
        await rank.greet()
        await rank.send(Data(bytes(size)))
        assert await rank.receive() == Hello()
        assert server.received == size
        for _ in range(2):
            await rank.send(Give(size))
        await asyncio.sleep(0.1)
        for _ in range(2):
            assert await rank.receive() == Data(bytes(size))
        server.room = SMALL
        operator = Client(path)
        await operator.greet()
        await operator.send(Data(bytes(100)))
        assert await operator.receive() == Hello()
        operator.socket.send(encode(Data(bytes(2 << 20)))[:1000])
        assert await operator.receive() is None
        unknown = Client(path)
        unknown.socket.send(encode(Data(bytes(1 << 20)))[:1000])
        assert await unknown.receive() is None

    served(tmp_path, server, story)
    assert len([text for text in server.told if "claims" in text]) == 2


def test_descriptors_wait_with_their_frame(tmp_path: Path) -> None:
    async def story(_: Listener[Frame], path: Path) -> None:
        client = Client(path)
        await client.greet()
        await client.send(Give(4 << 20))
        await client.send(Give(8, descriptor=True))
        await asyncio.sleep(0.1)  # the first fills the socket; the second waits behind it
        before = open_files()
        client.socket.setblocking(True)
        client.socket.settimeout(PATIENCE_S)
        got: list[int] = []
        rest = (4 << 20) + 8
        while rest > 0 or not got:
            data, come, _, _ = await asyncio.to_thread(socket.recv_fds, client.socket, 1 << 16, 4)
            rest -= len(data)
            got += come
        assert os.read(got[0], 100) == b"it came"
        os.close(got[0])
        await until(lambda: open_files() < before)  # no copy is left behind

    served(tmp_path, Echo(), story)


def test_who_does_not_say_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GREETING_S", 0.3)
    monkeypatch.setattr(module, "_SILENT_MAX", 4)
    server = Echo()

    async def story(_: Listener[Frame], path: Path) -> None:
        silent = [Client(path) for _ in range(4)]
        await until(lambda: server.opened == 4)
        more = Client(path)
        assert await silent[0].receive() is None, "the oldest makes room"
        await more.greet()
        assert await silent[1].receive() is None, "its time is over"
        await more.send(Give(1))
        assert await more.receive() == Data(bytes(1))
        wrong = Client(path)
        await wrong.send(Give(1))
        assert await wrong.receive() is None

    served(tmp_path, server, story)
    assert "the first frame was Give instead of Hello" in server.told


def test_who_has_said_it_while_nobody_listened_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process was stopped while they connected."""
    monkeypatch.setattr(module, "_SILENT_MAX", 4)
    server = Echo()

    async def story(_: Listener[Frame], path: Path) -> None:
        clients = [Client(path) for _ in range(12)]
        for client in clients:  # no turn of the loop until all have
            client.socket.send(encode(Hello()))
        for client in clients:
            assert await client.receive() == Hello()

    served(tmp_path, server, story)
    assert server.told == []


def test_there_is_an_end_to_how_many(tmp_path: Path) -> None:
    server = Echo()

    async def story(_: Listener[Frame], path: Path) -> None:
        clients = [Client(path) for _ in range(3)]
        for client in clients:
            await client.greet()
        assert await Client(path).receive() is None
        clients[0].socket.close()
        await until(lambda: server.closed == 1)
        await Client(path).greet()

    served(tmp_path, server, story, connections_max=3)


def test_descriptors_that_nobody_asked_for_are_closed(tmp_path: Path) -> None:
    async def story(_: Listener[Frame], path: Path) -> None:
        client = Client(path)
        await client.greet()
        before = open_files()
        for _ in range(50):
            socket.send_fds(client.socket, [encode(Give(1))], [0, 1, 2])
            await client.receive()
        assert open_files() < before + 50

    served(tmp_path, Echo(), story)


def test_a_socket_that_was_tidied_away_is_made_anew(tmp_path: Path) -> None:
    async def story(listener: Listener[Frame], path: Path) -> None:
        first = Client(path)
        await first.greet()
        listener.restore()
        path.unlink()  # noqa: ASYNC240
        listener.restore()
        assert path.stat().st_mode & 0o777 == 0o600  # noqa: ASYNC240
        await Client(path).greet()
        await first.send(Give(1))
        assert await first.receive() == Data(bytes(1))

    served(tmp_path, Echo(), story)


def test_anothers_socket_is_left_alone(tmp_path: Path) -> None:
    async def tell() -> None:
        path = tmp_path / "socket"
        listener = Listener(path, Echo(), listen(path), 10)
        other = listen(path)
        listener.close()
        assert path.exists()
        other.close()

    asyncio.run(tell())
