"""A rank's connection to its agent."""

from __future__ import annotations

import os
from typing import NoReturn, TypeVar

from resilient_train.config import AgentLink
from resilient_train.errors import ConfigError, JobEnded, ProtocolError
from resilient_train.protocol.messages import Arena, Borrow, End, FromAgent, Hello, Refused, Reply, Reserve, Welcome
from resilient_train.session.peers import Peers
from resilient_train.transport import Channel

_Frame = TypeVar("_Frame", bound=FromAgent)


class Link:
    """``peers`` is the memory that came with the agent's welcome."""

    def __init__(self, link: AgentLink) -> None:
        self.rank = link.rank
        self.world_size = link.world_size
        self.incarnation = link.incarnation
        self.channel = Channel(link.socket)
        self.channel.send(_hello(link))
        welcome = self.channel.receive(timeout_s=60)
        if isinstance(welcome, Reply):
            raise ConfigError(welcome.error)
        if isinstance(welcome, End):
            leave(welcome)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"the agent answered {type(welcome).__name__} instead of Welcome")
        self.generation = welcome.generation
        self.source = welcome.source
        self.attempt = welcome.attempt
        board, arena = self.channel.take_descriptors(2)
        self.peers = Peers.attach(link.rank, link.world_size, (board, arena), self._borrow, self._reserve)

    def _borrow(self, rank: int) -> int:
        self.channel.send(Borrow(rank))
        return self._receive_arena()

    def _reserve(self, slot_bytes: int) -> int:
        self.channel.send(Reserve(slot_bytes))
        return self._receive_arena()

    def _receive_arena(self) -> int:
        self.expect(Arena)
        return self.channel.take_descriptors(1)[0]

    def expect(self, kind: type[_Frame]) -> _Frame:
        """Waits for the agent's answer of that kind. SystemExit: the job ends."""
        # Frames that arrive before the answer belong to whoever waits for them: they are put back in order.
        early: list[FromAgent] = []
        while not isinstance(frame := self.receive(), kind):
            early.append(frame)
        self.channel.put_back(early)
        return frame

    def wait_for_the_end(self) -> NoReturn:
        """The agent is about to end this process, or the job."""
        while True:
            self.receive()

    def receive(self) -> FromAgent:
        """The agent's next frame. SystemExit: the job ends."""
        frame = self.channel.receive()
        assert frame is not None, "a receive without a time limit returned nothing"
        if isinstance(frame, End):
            leave(frame)
        return frame

    def close(self) -> None:
        """Closes the channel and unmaps the memory."""
        self.channel.close()
        self.peers.close()


def _hello(link: AgentLink) -> Hello:
    return Hello("rank", link.rank, link.incarnation, os.getpid(), token=link.token)


def leave(end: End) -> NoReturn:
    """The agent has ended the job: this process goes, with the job's exit code."""
    raise SystemExit(end.code or 1)


def refuse(link: AgentLink, text: str) -> None:
    """Tells the agent that the user's Session is wrong, so that the job ends with exit code 2 and this text."""
    try:
        channel = Channel(link.socket)
        channel.send(_hello(link))
        channel.send(Refused(text))
        channel.close()
    except (OSError, JobEnded):
        return  # the exception that follows says the same in this rank's own log
