"""Frames: whatever the bytes, a whole frame or a ProtocolError; over a real socket pair where descriptors travel."""

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_train import transport
from resilient_train.errors import JobEnded, ProtocolError
from resilient_train.protocol import messages as m
from resilient_train.transport import MAX_FRAME_BYTES, Channel, FrameBuffer, decode, encode, from_rank, peer_of

FRAMES = [
    m.Hello("rank", 3, 1, 42),
    m.Reserve(1 << 40),
    m.Borrow(2),
    m.SetUp(b"\x00\xff"),
    m.Strayed("x:1"),
    m.Started("digest", ("world", "tp"), ((0, 2), (1, 3))),
    m.Trouble(4, "Connection reset by peer – ü"),
    m.Unfinishable(4, "nobody knows what rank 1 would have sent"),
    m.Joined(1, 2, 3, True, 4, ("world",), 5),
    m.Built(1),
    m.Offer(1, 2, 3, 4, b"\x00\xff" * 100, "digest"),
    m.Pull(1, 2, 3),
    m.Fetched(1, 2, 3, 4, "memory"),
    m.Done(1, True, 7),
    m.LoopOver(1),
    m.Refused("no"),
    m.Inject("kill", 0),
    m.Inject("uce", 1, "gradient"),
    m.Query(),
]


def decode_from_rank(body: bytes) -> m.FromRank:
    return decode(body, from_rank)


def bodies(data: bytes) -> list[bytes]:
    return list(FrameBuffer().feed(data))


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_round_trip(frame: m.FromRank) -> None:
    (body,) = bodies(encode(frame))
    assert decode_from_rank(body) == frame


def test_cut_at_every_byte() -> None:
    data = b"".join(map(encode, FRAMES))
    for cut in range(len(data) + 1):
        buffer = FrameBuffer()
        found = [*buffer.feed(data[:cut]), *buffer.feed(data[cut:])]
        assert list(map(decode_from_rank, found)) == FRAMES


def test_byte_by_byte() -> None:
    buffer = FrameBuffer()
    found = [body for byte in b"".join(map(encode, FRAMES)) for body in buffer.feed(bytes([byte]))]
    assert list(map(decode_from_rank, found)) == FRAMES


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 0xFFFFFFFF, 0x20544547])  # the last is "GET " of HTTP
def test_hostile_lengths(length: int) -> None:
    with pytest.raises(ProtocolError, match=str(length)):
        bodies(struct.pack("<I", length))


def test_the_largest_length_is_waited_for() -> None:
    assert bodies(struct.pack("<I", MAX_FRAME_BYTES) + b"x") == []


def test_too_large_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ProtocolError, match="Offer frame of"):
        encode(m.Offer(1, 2, 3, 4, bytes(200), ""))


@given(st.binary())
def test_foreign_bodies(body: bytes) -> None:
    try:
        decode_from_rank(body)
    except ProtocolError:
        pass


@given(st.sampled_from(FRAMES), st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte(frame: m.FromRank, place: int, flip: int) -> None:
    data = bytearray(encode(frame))
    data[place % len(data)] ^= flip
    try:
        for body in bodies(bytes(data)):
            decode_from_rank(body)
    except ProtocolError:
        pass


@given(st.lists(st.binary(max_size=50)))
def test_any_stream(pieces: list[bytes]) -> None:
    buffer = FrameBuffer()
    try:
        found = [body for piece in pieces for body in buffer.feed(piece)]
    except ProtocolError:
        return
    assert sum(map(len, found)) <= sum(map(len, pieces))


def test_a_rank_may_not_speak_for_the_agent() -> None:
    for frame in (m.Resume(1), m.Stop(1, (), ""), m.End(0, ""), m.Plan(1, 0, {})):
        with pytest.raises(ProtocolError):
            decode_from_rank(bodies(encode(frame))[0])


@pytest.mark.parametrize(
    "frame",
    [
        m.Hello("rank", 0, 0, -1),
        m.Hello("rank", 0, 0, 1 << 31),
        m.Reserve(0),
        m.Reserve(1 << 45),
        m.Joined(1, 2, 4, True, 4, ()),
        m.Joined(1, 2, -1, True, 4, ()),
    ],
)
def test_numbers_that_the_agents_memory_would_refuse(frame: m.FromRank) -> None:
    with pytest.raises(ProtocolError):
        decode_from_rank(bodies(encode(frame))[0])


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Channel, socket.socket]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        channel = Channel(str(tmp_path / "s"))
        agent, _ = listener.accept()
        with agent:
            yield channel, agent
        channel.close()


def test_channel_both_ways(ends: tuple[Channel, socket.socket]) -> None:
    channel, agent = ends
    assert peer_of(agent).trusted
    assert peer_of(agent).pid == os.getpid()
    assert channel.receive(timeout_s=0) is None
    channel.send(m.Query())
    assert decode_from_rank(bodies(agent.recv(1000))[0]) == m.Query()
    agent.sendall(encode(m.Resume(1)) + encode(m.Stop(2, (1,), "died")) + encode(m.Plan(2, 5, {1: 0}, (0,), (1,))))
    assert [channel.receive() for _ in range(3)] == [
        m.Resume(1),
        m.Stop(2, (1,), "died"),
        m.Plan(2, 5, {1: 0}, (0,), (1,)),
    ]


def test_frames_put_back_come_first(ends: tuple[Channel, socket.socket]) -> None:
    channel, agent = ends
    agent.sendall(encode(m.Resume(3)))
    channel.put_back([m.Resume(1), m.Resume(2)])
    assert [channel.receive() for _ in range(3)] == [m.Resume(1), m.Resume(2), m.Resume(3)]


def test_wait_either(ends: tuple[Channel, socket.socket]) -> None:
    channel, agent = ends
    readable, writable = os.pipe()
    os.write(writable, b"x")
    assert channel.wait_either(readable)
    agent.sendall(encode(m.Resume(1)))
    assert channel.receive() == m.Resume(1)
    channel.put_back([m.Resume(1)])
    assert not channel.wait_either(readable)
    os.close(readable)
    os.close(writable)


def test_descriptors(ends: tuple[Channel, socket.socket], tmp_path: Path) -> None:
    channel, agent = ends
    path = tmp_path / "given"
    path.write_text("content")
    with path.open() as file:
        socket.send_fds(agent, [encode(m.ArenaFrame(1))], [file.fileno()])
    assert channel.receive() == m.ArenaFrame(1)
    (descriptor,) = channel.take_descriptors(1)
    assert os.read(descriptor, 100) == b"content"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    with pytest.raises(ProtocolError, match="expected 1 descriptors, got 0"):
        channel.take_descriptors(1)


def test_descriptors_that_this_process_has_no_room_for(ends: tuple[Channel, socket.socket], tmp_path: Path) -> None:
    """The kernel hands on as many as there is room for: those must not be taken for others, that come later."""
    channel, agent = ends
    (tmp_path / "lost").touch()
    (tmp_path / "given").write_text("content")
    with (tmp_path / "lost").open() as lost:
        socket.send_fds(agent, [encode(m.ArenaFrame(1))], [lost.fileno()] * 2)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    fillers = [os.dup(0)]
    while fillers[-1] <= highest:
        fillers.append(os.dup(0))
    os.close(fillers.pop(0))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1, before[1]))
        assert channel.receive() == m.ArenaFrame(1)
        with pytest.raises(OSError, match="no room for 2 descriptors that were sent"):
            channel.take_descriptors(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in fillers:
            os.close(each)
    with (tmp_path / "given").open() as given:
        socket.send_fds(agent, [encode(m.ArenaFrame(2))], [given.fileno()])
    assert channel.receive() == m.ArenaFrame(2)
    (descriptor,) = channel.take_descriptors(1)
    assert os.read(descriptor, 100) == b"content"
    os.close(descriptor)


def test_a_closed_agent_is_a_job_that_ended(ends: tuple[Channel, socket.socket]) -> None:
    channel, agent = ends
    agent.close()
    with pytest.raises(JobEnded, match="closed the connection"):
        channel.receive()
    with pytest.raises(JobEnded, match="is gone"):
        channel.send(m.Query())


@pytest.mark.parametrize("data", [encode(m.Query()), struct.pack("<I", 3) + b"abc", b"GET / HTTP/1.1\r\n"])
def test_an_agent_that_talks_nonsense(ends: tuple[Channel, socket.socket], data: bytes) -> None:
    channel, agent = ends
    agent.sendall(data)
    with pytest.raises(ProtocolError):
        channel.receive()


LISTENS = """
import sys
from pathlib import Path
from resilient_train.transport import listen
listener = listen(Path(sys.argv[1]))
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_whether_the_other_end_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LISTENS, str(path)], **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        channel = Channel(str(path))
        assert not channel.peer_is_stopped()
        for number, option in ((signal.SIGSTOP, os.WSTOPPED), (signal.SIGCONT, os.WCONTINUED)):
            child.send_signal(number)
            os.waitid(os.P_PID, child.pid, option)
            assert channel.peer_is_stopped() == (number == signal.SIGSTOP)
        child.kill()
        child.wait()
        assert not channel.peer_is_stopped(), "it is gone"
        channel.close()
