"""A rank's connection to its agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn, TypeVar

from resilient_train.config import AgentLink
from resilient_train.errors import ConfigError, JobEnded, ProtocolError
from resilient_train.protocol.messages import (
    Address,
    ArenaFrame,
    Borrow,
    End,
    FromAgent,
    Hello,
    Plain,
    Refused,
    Reply,
    Reserve,
    Welcome,
)
from resilient_train.session.peers import Peers
from resilient_train.transport import Channel

_Frame = TypeVar("_Frame", bound=FromAgent)


class Link:
    """``peers`` is the memory that came with the agent's welcome."""

    def __init__(self, link: AgentLink) -> None:
        self.agent = link
        self.rank = link.rank
        self.world_size = link.world_size
        self.incarnation = link.incarnation
        self.channel = Channel(link.socket)
        self.channel.send(_hello(link))
        # Without a limit: an agent that is stopped, or has no descriptor for us just now, is still this job's. Who does
        # not come to it in time is seen to by the agent.
        welcome = self.channel.receive()
        if isinstance(welcome, Reply):
            raise ConfigError(welcome.error)
        if isinstance(welcome, End):
            leave(welcome)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"the agent answered {type(welcome).__name__} instead of Welcome")
        self.generation = welcome.generation
        self.source = welcome.source
        self.attempt = welcome.attempt
        self.look_at = welcome.look_at
        self._listens: tuple[int, Callable[[Address], None]] = 0, lambda _: None
        self._addresses: list[Address] = []
        """Of a generation whose groups this rank has not begun to build."""
        board, arena = self.channel.take_descriptors(2)
        self.peers = Peers.attach(link.rank, link.world_size, (board, arena), self._borrow, self._reserve)

    def _borrow(self, rank: int) -> int:
        self.channel.send(Borrow(rank))
        return self._receive_arena()

    def _reserve(self, slot_bytes: int) -> int:
        self.channel.send(Reserve(slot_bytes))
        return self._receive_arena()

    def _receive_arena(self) -> int:
        self.expect(ArenaFrame)
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

    def hear_addresses(self, generation: int, hear: Callable[[Address], None]) -> None:
        """From now on what the others tell where they listen is handed to ``hear``, with what has come already."""
        self._listens = generation, hear
        early, self._addresses = self._addresses, []
        for frame in early:
            self._file(frame)

    def receive(self) -> FromAgent:
        """The agent's next frame. SystemExit: the job ends."""
        while (frame := self.receive_one()) is None:
            pass
        return frame

    def receive_one(self) -> FromAgent | None:
        """The same, or None if it was an address, which has gone where it belongs."""
        frame = self.channel.receive()
        assert frame is not None, "a receive without a time limit returned nothing"
        if isinstance(frame, End):
            leave(frame)
        if not isinstance(frame, Address):
            return frame
        self._file(frame)
        return None

    def _file(self, frame: Address) -> None:
        generation, hear = self._listens
        if frame.generation == generation:
            hear(frame)
        elif frame.generation > generation:
            self._addresses.append(frame)

    def close(self) -> None:
        """Closes the channel and unmaps the memory."""
        self.channel.close()
        self.peers.close()


def _hello(link: AgentLink) -> Hello:
    return Hello("rank", link.rank, link.incarnation, os.getpid(), token=link.token)


def leave(end: End) -> NoReturn:
    """The agent has ended the job: this process goes, with the job's exit code."""
    raise SystemExit(end.code or 1)


def say_once(link: AgentLink, frame: Refused | Plain) -> None:
    """Tells the agent what this process's Session is: wrong, so that the job ends with exit code 2, or a plain loop."""
    try:
        channel = Channel(link.socket)
        channel.send(_hello(link))
        channel.send(frame)
        channel.close()
    except (OSError, JobEnded):
        return  # what the process does or raises now says the same
