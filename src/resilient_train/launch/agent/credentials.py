"""Who may speak to the agent, and as whom: the first frame of a connection is checked against what the kernel says.

A *rank* must know the token that this agent has given to its processes, and be the process that was started for it; so
neither a rank of another launcher, nor what a rank has started, is taken for one. An *operator* (a command) need only
be of the same user, or root. Who speaks another version of the protocol is told so in one line, and not listened to.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import Protocol

from resilient_train.errors import ProtocolError
from resilient_train.launch.agent.operators import Operators
from resilient_train.launch.agent.processes import Processes
from resilient_train.observe.sinks import say_aside
from resilient_train.protocol import messages as m
from resilient_train.protocol.job import Job
from resilient_train.transport import from_rank
from resilient_train.unix_listener import LARGE, SMALL, Connection, Server

RankConnection = Connection[m.FromRank]
_SET_UP = "set-up"
_IMPORT = "import"
_TRIES = 10
"""So often, a second apart, a rank may find this process without descriptors or memory for it."""


def new_token() -> str:
    """For one agent's life."""
    return secrets.token_hex(16)


class RankHearer(Protocol):
    """Whom the ranks speak to: implemented by the agent."""

    def greet(self, rank: int, hello: m.Hello, connection: RankConnection) -> None:
        """The rank's process has come."""
        ...

    def imports_us(self, rank: int, incarnation: int) -> None:
        """Its script does: a Session is to be expected."""
        ...

    def set_up_of(self, rank: int) -> m.SetUp:
        """What a process that takes the rank's place is told before it comes."""
        ...

    def hear(self, rank: int, incarnation: int, frame: m.FromRank, connection: RankConnection) -> None:
        """It has said something."""
        ...

    def disown(self, rank: int, why: str) -> None:
        """What came from it can't be understood, or it does not read: its connection is being closed."""
        ...

    def shut_out(self, error: OSError) -> None:
        """Nobody can connect, and could not for a while."""
        ...


class Admission(Server[m.FromRank]):
    """``connections``: those of the present ranks."""

    decoder = from_rank
    greeting = m.Hello

    def __init__(
        self,
        token: str,
        job: Job,
        processes: Processes,
        operators: Operators,
        hearer: RankHearer,
        note: Callable[..., None],
    ) -> None:
        self.connections: dict[int, RankConnection] = {}
        self._token = token
        self._job = job
        self._processes = processes
        self._operators = operators
        self._hearer = hearer
        self._note = note

    def on_frame(self, connection: RankConnection, frame: m.FromRank) -> None:
        hello = connection.greeting
        assert isinstance(hello, m.Hello)
        if frame is hello:
            self._admit(connection, hello)
        elif hello.role == _IMPORT:
            raise ProtocolError(f"{type(frame).__name__} where nothing but an import is told")
        elif hello.role == "operator":
            self._operators.answer(connection, frame)
        elif self._is_current(hello.rank, hello.incarnation):
            self._hear(connection, hello, frame)

    def _hear(self, connection: RankConnection, hello: m.Hello, frame: m.FromRank) -> None:
        # The rank's own says a last word on a second connection (``link.refuse``); it gets no answers there.
        last_word = m.Strayed if hello.role == _SET_UP else m.Refused
        if connection is not self.connections.get(hello.rank) and not isinstance(frame, last_word):
            raise ProtocolError(f"{type(frame).__name__} on a second connection that says that it is this rank")
        self._hearer.hear(hello.rank, hello.incarnation, frame, connection)
        if isinstance(frame, m.Strayed):
            connection.send(m.Reply())

    def on_foreign(self, connection: RankConnection | None, text: str) -> None:
        hello = connection.greeting if connection is not None else None
        rank = hello.rank if isinstance(hello, m.Hello) else -1
        self._note("foreign_frame", rank=rank, detail={"text": text})
        if connection is not None and connection is self.connections.get(rank):
            del self.connections[rank]
            self._hearer.disown(rank, text)

    def on_short(self, error: OSError, tries: int) -> None:
        super().on_short(error, tries)
        if tries == 1:
            say_aside(
                f"nobody can connect for now: {error}; ranks that come wait until this process has descriptors again "
                "(ulimit -n)"
            )
        elif tries > _TRIES:
            self._hearer.shut_out(error)

    def _admit(self, connection: RankConnection, hello: m.Hello) -> None:
        refusal = self._refusal(connection, hello)
        if hello.role == _IMPORT:
            # A refusal is no event here: what a rank starts has the rank's variables, and may import us as well.
            if not refusal:
                self._hearer.imports_us(hello.rank, hello.incarnation)
            connection.send(m.Reply(error=refusal))
            return
        if refusal:
            connection.send(m.Reply(error=refusal))
            raise ProtocolError(refusal)
        if hello.role == "operator":
            connection.admit(SMALL)
            return
        if hello.role == _SET_UP:
            connection.admit(SMALL)
            connection.send(self._hearer.set_up_of(hello.rank))
            return
        connection.admit(LARGE)
        known = self.connections.get(hello.rank)
        if known is not None and not known.closed:
            return
        self.connections[hello.rank] = connection
        self._hearer.greet(hello.rank, hello, connection)

    def _refusal(self, connection: RankConnection, hello: m.Hello) -> str:
        """Why this peer is not listened to; empty if it is."""
        if hello.version != m.PROTOCOL_VERSION:
            return (
                f"version {hello.version} of the protocol is spoken here, but the job's agent speaks "
                f"{m.PROTOCOL_VERSION}: both must be of the same resilient_train"
            )
        if hello.role == "operator":
            return ""
        if hello.role not in ("rank", _SET_UP, _IMPORT):
            return f"nobody has the role {hello.role!r}"
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "this process was started by another launcher than the one that runs in this run directory"
        if not self._is_current(hello.rank, hello.incarnation):
            return f"this process is not rank {hello.rank} (any more)"
        if not self._processes.current[hello.rank].owns(connection.peer.pid):
            return (
                f"process {connection.peer.pid} is not the one that was started as rank {hello.rank}: a process that a "
                "rank starts has no Session of its own (RESILIENT_AGENT was inherited, or exported by hand)"
            )
        return ""

    def _is_current(self, rank: int, incarnation: int) -> bool:
        known = 0 <= rank < self._job.world_size and rank in self._processes.current
        return known and self._job.incarnations[rank] == incarnation

    def forget(self, rank: int) -> RankConnection | None:
        """The rank gets another process: the connection of the one before, to be closed."""
        return self.connections.pop(rank, None)
