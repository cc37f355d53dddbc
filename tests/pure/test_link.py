"""A rank that waits for an answer, and is told of the job's end instead: it leaves with the job's exit code."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_train._native import Board
from resilient_train.config import AgentLink
from resilient_train.errors import ConfigError
from resilient_train.protocol import messages as m
from resilient_train.session.link import Link
from resilient_train.state.arena import Arena
from resilient_train.transport import encode

SLOT_BYTES = 4096


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

    def link(self) -> Link:
        """A rank's link; the agent has said all that it will say before the rank reads."""
        import threading

        def serve() -> None:
            self.connection, _ = self.listener.accept()
            data, descriptors = self.waiting
            socket.send_fds(self.connection, [data], list(descriptors))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return Link(AgentLink(str(self.path), 0, 1, 0, False, str(self.path.parent), "token"))
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
    before = len(list(Path("/proc/self/fd").iterdir()))
    socket.send_fds(agent.connection, [encode(m.Arena(0))], [larger.fd])
    link.peers.publish(1, bytes(1 << 16))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert larger.published(1) == link.peers.published(1) == bytes(1 << 16)
