"""A rank that waits for an answer, and is told of the job's end instead: it leaves with the job's exit code."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from resilient_train._native import Board
from resilient_train.config import AgentLink
from resilient_train.errors import ConfigError
from resilient_train.frameworks.set_up_recall import recall
from resilient_train.protocol import messages as m
from resilient_train.session.agent_link import Link
from resilient_train.state.arena import Arena
from resilient_train.transport import Channel, encode

Answer = TypeVar("Answer")
SLOT_BYTES = 4096


def address(generation: int, value: bytes = b"there") -> m.Address:
    return m.Address(generation, "group/0", value, (0,))


class Agent:
    """The agent's end of a rank's connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.board = Board.create(1)
        self.arenas = [Arena.create(SLOT_BYTES)]

    def say(self, *frames: m.FromAgent, descriptors: tuple[int, ...] = ()) -> None:
        """What the next connection will find, which has not been made yet."""
        self.waiting = b"".join(map(encode, frames)), descriptors

    @property
    def identity(self) -> AgentLink:
        return AgentLink(str(self.path), 0, 1, 0, False, str(self.path.parent), "token")

    def link(self) -> Link:
        """A rank's link; the agent has said all that it will say before the rank reads."""
        return self.served(lambda: Link(self.identity))

    def served(self, connect: Callable[[], Answer]) -> Answer:
        def serve() -> None:
            self.connection, _ = self.listener.accept()
            data, descriptors = self.waiting
            socket.send_fds(self.connection, [data], list(descriptors))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return connect()
        finally:
            thread.join()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "s")
    yield agent
    agent.connection.close()
    agent.listener.close()


def welcome(agent: Agent, *more: m.FromAgent) -> Link:
    agent.say(m.Welcome(0, 0), *more, descriptors=(agent.board.fd, agent.arenas[0].fd))
    return agent.link()


def open_on(arena: Arena) -> int:
    """Descriptors of this process on that memory. How many there are at all, other tests' garbage decides."""
    files = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one by which the directory is read
            files.append(os.fstat(int(each.name)).st_ino)
    return files.count(os.fstat(arena.fd).st_ino)


def test_an_answer_that_comes_behind_others(agent: Agent) -> None:
    link = welcome(agent, m.Stop(1, (), "x"), m.VaultOpened("no"), m.Resume(1))
    assert link.expect(m.VaultOpened).error == "no"
    assert link.receive() == m.Stop(1, (), "x")
    assert link.receive() == m.Resume(1)


def test_the_end_comes_in_place_of_the_answer(agent: Agent) -> None:
    link = welcome(agent, m.Stop(1, (), "x"), m.End(3, "enough"), m.VaultOpened())
    with pytest.raises(SystemExit) as left:
        link.expect(m.VaultOpened)
    assert left.value.code == 3


def test_the_end_comes_in_place_of_a_welcome(agent: Agent) -> None:
    agent.say(m.End(4, "enough"))
    with pytest.raises(SystemExit) as left:
        agent.link()
    assert left.value.code == 4


def test_a_refusal_is_the_users_to_read(agent: Agent) -> None:
    agent.say(m.Reply(error="version 7 is spoken here"))
    with pytest.raises(ConfigError, match="version 7"):
        agent.link()


def test_an_arena_that_grows_takes_the_place_of_the_old_one(agent: Agent) -> None:
    larger = Arena.create(1 << 20)
    link = welcome(agent)
    one = open_on(larger)
    assert open_on(agent.arenas[0]) == 2 * one, "the agent's and the rank's"
    socket.send_fds(agent.connection, [encode(m.ArenaFrame(0))], [larger.fd])
    link.peers.publish(1, bytes(1 << 16))
    assert (open_on(agent.arenas[0]), open_on(larger)) == (one, 2 * one)
    assert larger.published(1) == link.peers.published(1) == bytes(1 << 16)


def test_addresses_go_to_who_builds_that_generation_whenever_they_come(agent: Agent) -> None:
    """Not to who waits for another frame; those of a generation that has not begun to be built are kept for it."""
    welcome = m.Welcome(0, 0)
    agent.say(
        *(welcome, address(1), address(3, b"later"), m.Pull(2, 0, 0), address(2), address(3, b"last"), m.Pull(3, 0, 0)),
        descriptors=(agent.board.fd, agent.arenas[0].fd),
    )
    link = agent.link()
    heard: list[bytes] = []
    link.hear_addresses(2, lambda frame: heard.append(frame.value))
    assert link.receive() == m.Pull(2, 0, 0)
    link.hear_addresses(3, lambda frame: heard.append(frame.value))
    assert link.receive() == m.Pull(3, 0, 0)
    assert heard == [b"later", b"last"]
    link.close()


@pytest.mark.parametrize("asks", ["a Session", "what its collectives gave it"])
def test_an_agent_that_does_not_answer_yet_is_waited_for(
    agent: Agent, asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit: it may have no descriptor just now. A rank that gave up would end the job, as if by an error of
    its script's. Found by the soak: a launcher that had no descriptors for a minute.
    """
    limits: list[float | None] = []
    receive = Channel.receive

    def watched(channel: Channel, timeout_s: float | None = None) -> m.FromAgent | None:
        limits.append(timeout_s)
        return receive(channel, timeout_s)

    monkeypatch.setattr(Channel, "receive", watched)
    if asks == "a Session":
        welcome(agent).close()
    else:
        agent.say(m.SetUp(b"record"))
        assert agent.served(lambda: recall(agent.identity).record) == b"record"
    assert limits == [None]
