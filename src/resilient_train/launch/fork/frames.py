"""What the agent and a process that waits at its gate say to each other.

A *gate* is a socket between the two. All processes of this room wait at one, and any of them does what it is told next:
fork, import, become a rank, or run the script ahead. What a process is called says what it has been told so far: the
*root* nothing, the *zygote* to import, a *spare* (a fork of the zygote) nothing yet.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import msgspec

from resilient_train.launch.fork.imports import Script, script_of
from resilient_train.transport import FrameBuffer, Wire, encode


class Command(msgspec.Struct, frozen=True):
    """What the ranks run, and with which variables. As bytes: neither need be UTF-8 (``odd_text.py``)."""

    arguments: tuple[bytes, ...]
    variables: dict[bytes, bytes]

    @classmethod
    def of(cls, command: Sequence[str], environ: Mapping[str, str]) -> Command:
        return cls(
            tuple(map(os.fsencode, command)), {os.fsencode(name): os.fsencode(each) for name, each in environ.items()}
        )

    @property
    def command(self) -> tuple[str, ...]:
        return tuple(map(os.fsdecode, self.arguments))

    @property
    def target(self) -> Script:
        target = script_of(self.command)
        assert isinstance(target, Script), target  # the agent has looked
        return target

    @property
    def environ(self) -> dict[str, str]:
        return {os.fsdecode(name): os.fsdecode(each) for name, each in self.variables.items()}


class Fork(msgspec.Struct, tag=True, frozen=True):
    """To a process at its gate, with one descriptor: the gate of the fork that it is to make. Answer: Forked."""


class Import(msgspec.Struct, tag=True, frozen=True):
    """Import what the script imports, but for the modules in ``skip``. Answers: Importing for each, Ready or Unfit."""

    run: Command
    skip: tuple[str, ...] = ()


class Life(msgspec.Struct, tag=True, frozen=True):
    """With two descriptors, stdout and stderr: become a rank. The gate is closed for an answer."""

    run: Command
    cwd: bytes
    """Empty: the agent's folder was removed, and the fork stays where it stands."""


class Ahead(msgspec.Struct, tag=True, frozen=True):
    """Run the script up to the point where a standby waits. ``attempt``: see ``config.ATTEMPT``.

    Answers: Waits, and then Life is expected; or Unready.
    """

    run: Command
    attempt: str


class Forked(msgspec.Struct, tag=True, frozen=True):
    """The fork waits at its gate; 0: it could not be made."""

    pid: int


class Importing(msgspec.Struct, tag=True, frozen=True):
    """Sign of life."""

    module: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Forks of this process have done the imports. ``failed``: those that did not work, and why."""

    modules: int
    failed: dict[str, str]
    cpu_s: float
    rss_bytes: int


class Unfit(msgspec.Struct, tag=True, frozen=True):
    """This process must not be forked. Without ``culprit`` among its imports it might have been."""

    reason: str
    culprit: str = ""


class Waits(msgspec.Struct, tag=True, frozen=True):
    """The script has come to its standby point."""

    cpu_s: float


class Unready(msgspec.Struct, tag=True, frozen=True):
    """The last word of a process that can't wait there."""

    reason: str


Order = Fork | Import | Life | Ahead
Answer = Forked | Importing | Ready | Unfit | Waits | Unready
_DESCRIPTORS = {Fork: 1, Life: 2}
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class _Closed(Exception):  # noqa: N818 - no error: how a process learns that nobody needs it
    pass


class Gate(Wire[Order]):
    """The end of a process that waits: blocking, one order at a time."""

    def __init__(self, descriptor: int) -> None:
        endpoint = socket.socket(fileno=descriptor)
        endpoint.set_inheritable(False)
        super().__init__(endpoint, _orders, _Closed)

    def next(self) -> tuple[Order | None, list[int]]:
        """The next order, and the descriptors that came with it; None when the agent has closed the gate."""
        try:
            order = self.receive()
        except _Closed:
            return None, []
        return order, self.take_descriptors(_DESCRIPTORS.get(type(order), 0) if order is not None else 0)


class FarGate:
    """The agent's end, which never waits. Raises OSError where the other process does not take what it is told."""

    def __init__(self, endpoint: socket.socket) -> None:
        self._socket = endpoint
        self._socket.setblocking(False)
        self._frames = FrameBuffer()

    def fileno(self) -> int:
        """Readable when ``receive`` has something to read; -1 when it is closed."""
        return self._socket.fileno()

    def tell(self, order: Order, descriptors: Sequence[int] = ()) -> None:
        """Sends an order. It is far smaller than the socket's buffer, and there is never more than one in it."""
        data = encode(order)
        if descriptors:
            # They go with the first byte: behind the last one, a rank-to-be has closed its gate already.
            data = data[socket.send_fds(self._socket, [data[:1]], list(descriptors)) :]
        sent = self._socket.send(data)
        if sent < len(data):
            raise BlockingIOError(f"the order of {len(data)} bytes was not taken whole")

    def receive(self) -> list[Answer] | None:
        """The answers that are there; None when the process is gone. Raises ProtocolError, MsgspecError."""
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        return [_answers.decode(body) for body in self._frames.feed(data)]

    def close(self) -> None:
        """Closes this end; idempotent."""
        self._socket.close()


def gates() -> tuple[FarGate, socket.socket]:
    """The agent's end of a new gate, and the other, to be handed over."""
    ours, theirs = socket.socketpair()
    return FarGate(ours), theirs
