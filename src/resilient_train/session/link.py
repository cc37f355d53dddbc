"""A rank's connection to its agent: the channel, the board with the step records, the rank's arena."""

from __future__ import annotations

import os
from typing import NoReturn, TypeVar

from resilient_train._native import Board, Page
from resilient_train.config import AgentLink
from resilient_train.errors import ConfigError, JobEnded, ProtocolError
from resilient_train.protocol.messages import Arena as ArenaFrame
from resilient_train.protocol.messages import Borrow, End, FromAgent, Hello, Refused, Reply, Reserve, Welcome
from resilient_train.protocol.progress import Activity, progress_of
from resilient_train.protocol.standing import Standing
from resilient_train.state.arena import Arena, ArenaFullError
from resilient_train.transport import Channel

_Frame = TypeVar("_Frame", bound=FromAgent)


class Link:
    """Everything that outlives this process, as seen from it."""

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
        self.board = Board.attach(board)
        os.close(board)
        self.page = Page(self.board, link.rank)
        self.arena = Arena(arena)
        self.tail_used = True
        """Since the last ``reset_tail``."""
        if self.board.world_size != link.world_size:
            raise ConfigError(f"WORLD_SIZE is {link.world_size}, but this job has {self.board.world_size} ranks")

    def publish(self, commits: int, payload: bytes) -> None:
        """Publishes the per-rank state from which update ``commits`` can start; the arena grows if it must."""
        try:
            self.arena.publish(commits, payload)
        except ArenaFullError as full:
            self.channel.send(Reserve(full.needed_bytes * 2))
            larger = self._receive_arena()
            self.arena.close()
            self.arena = larger
            self.arena.publish(commits, payload)

    def borrow(self, rank: int) -> Arena:
        """Another rank's arena, to read; the caller closes it."""
        self.channel.send(Borrow(rank))
        return self._receive_arena()

    def log(self, meta: bytes, data: bytes) -> bool:
        """Publishes the arguments of a collective of the tail; False if there is no room for them."""
        self.tail_used = True
        entered, completed = self.board.tail(self.rank)
        if not self.arena.log_append(meta, data):
            return False
        self.board.set_tail(self.rank, entered + 1, completed)
        return True

    def logged(self, index: int) -> tuple[bytes, bytes]:
        """The arguments of collective ``index`` of the tail."""
        return self.arena.log_entry(index)

    def tail_completed(self, completed: int) -> None:
        """One more collective of the tail is done."""
        self.tail_used = True
        self.board.set_tail(self.rank, self.board.tail(self.rank)[0], completed)

    def reset_tail(self) -> None:
        """An update was applied: its tail begins, with an empty log. Needed only where ``tail_used``."""
        self.tail_used = False
        self.arena.log_reset()
        self.board.set_tail(self.rank, 0, 0)

    def _receive_arena(self) -> Arena:
        self.expect(ArenaFrame)
        return Arena(self.channel.take_descriptors(1)[0])

    def expect(self, kind: type[_Frame]) -> _Frame:
        """Waits for the agent's answer of that kind."""
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

    def record(self, standing: Standing, step: int) -> None:
        """Writes this rank's step record."""
        self.page.write(standing.commits, standing.phase, step)

    def stop_raised(self, generation: int) -> bool:
        """Whether a recovery newer than ``generation`` is under way."""
        return self.page.stop_raised(generation)

    def over_elsewhere(self, commits: int) -> bool:
        """Whether another rank has left its loop after that many updates."""
        others = (progress_of(self.board.progress(rank)) for rank in range(self.board.world_size) if rank != self.rank)
        return any(each.activity is Activity.FINISHED and each.commits == commits for each in others)

    def close(self) -> None:
        """Closes the channel and unmaps the memory."""
        self.channel.close()
        self.arena.close()
        self.board.close()


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
