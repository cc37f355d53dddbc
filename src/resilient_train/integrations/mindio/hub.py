"""The controller's port: connections of processors, and a thread that feeds ``controller.py`` with what they say."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Iterable

from resilient_train.errors import ConfigError, ProtocolError
from resilient_train.integrations.mindio import wire
from resilient_train.integrations.mindio.controller import Controller, Effect, Ended, Note, Policy, Stage, Timer, To
from resilient_train.integrations.mindio.frames import Bye, Did, FromProcessor, Hello, Over, Replicas, Reported, Status
from resilient_train.transport import FrameBuffer, decode, encode

log = logging.getLogger("resilient_train.mindio")

_MINUTE_S = 60.0
_ACTION_S = 180.0
"""MindIO's TTP_NORMAL_ACTION_TIME_LIMIT."""
_LIMITS_S = {
    Stage.LOCKING: 30.0,
    Stage.JOINING: 10 * _MINUTE_S,
    Stage.REBUILDING: 10 * _MINUTE_S,
    Stage.SAVING: 30 * _MINUTE_S,
}
"""How long each stage may take, as MindIO has it; the others _ACTION_S."""
_GREETING_S = 10.0
_STRANGERS_MAX = 64


class Hub:
    """Listens from when it is made until ``close``."""

    def __init__(self, address: str, port: int, world_size: int, policy: Policy, secret: bytes = b"") -> None:
        """Raises ConfigError for an address that can't be listened at."""
        wire.check_bind(address, secret)
        self._secret, self._world_size = secret, world_size
        self._controller = Controller(world_size, policy)
        self._seated: dict[int, _Visitor] = {}
        self._visitors: set[_Visitor] = set()
        try:
            self._listening = socket.create_server((address, port), backlog=1024)
        except OSError as error:
            raise ConfigError(f"the controller can't listen at {address}:{port}: {error.strerror}") from None
        self.port: int = self._listening.getsockname()[1]
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rt-mindio-hub", daemon=True)
        self._thread.start()

    @property
    def stage(self) -> Stage:
        """Where the job is."""
        return self._controller.stage

    def close(self) -> None:
        """Ends the thread and all connections; ranks are told."""
        self._loop.call_soon_threadsafe(self._leave)
        self._thread.join()

    def _leave(self) -> None:
        self._closed = True
        for each in self._seated.values():
            each.send(Over())
        self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listening))
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for each in list(self._visitors):
                each.writer.close()
            serving = asyncio.all_tasks(self._loop)
            for task in serving:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*serving, return_exceptions=True))
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visitor = _Visitor(writer)
        if len(self._visitors) - len(self._seated) >= _STRANGERS_MAX:
            writer.close()
            return
        self._visitors.add(visitor)
        try:
            await self._listen(visitor, reader)
        except asyncio.CancelledError:
            return  # the hub is closed
        except (ProtocolError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.warning("a connection to the controller ends: %s", error or type(error).__name__)
        finally:
            self._visitors.discard(visitor)
            writer.close()
            if not self._closed and self._seated.get(visitor.rank) is visitor:
                del self._seated[visitor.rank]
                self._carry_out(self._controller.gone(visitor.rank))

    async def _listen(self, visitor: _Visitor, reader: asyncio.StreamReader) -> None:
        wire.notice_silence(visitor.writer.get_extra_info("socket"))
        number = os.urandom(32)
        visitor.send(wire.Challenge(number))
        buffer = FrameBuffer(wire.GREETING_BYTES)
        while data := await asyncio.wait_for(reader.read(1 << 16), None if visitor.rank >= 0 else _GREETING_S):
            for body in buffer.feed(data):
                frame = decode(body, wire.from_processor)
                if visitor.rank >= 0:
                    self._on_frame(visitor.rank, frame)
                    continue
                self._admit(visitor, frame, number)
                buffer.limit_bytes = wire.FRAME_BYTES

    def _admit(self, visitor: _Visitor, frame: FromProcessor, number: bytes) -> None:
        """Raises ProtocolError for who is no rank of this job."""
        if not isinstance(frame, Hello) or not wire.is_proven(self._secret, number, frame):
            raise ProtocolError("a stranger")
        if frame.world_size != self._world_size or not 0 <= frame.rank < self._world_size:
            raise ProtocolError(f"rank {frame.rank} of {frame.world_size} comes to a job of {self._world_size} ranks")
        before = self._seated.get(frame.rank)
        if before is not None:
            if self._controller.stage is Stage.STARTING:
                raise ProtocolError(f"rank {frame.rank} is there already")
            before.writer.close()
        self._seated[frame.rank] = visitor
        visitor.rank = frame.rank
        self._carry_out(self._controller.hello(frame.rank))

    def _on_frame(self, rank: int, frame: FromProcessor) -> None:
        controller = self._controller
        match frame:
            case Replicas(groups=groups):
                self._carry_out(controller.replicas(rank, groups))
            case Status(step=step, updating=updating):
                self._carry_out(controller.status(rank, step, updating=updating))
            case Reported(state=state, code=code):
                self._carry_out(controller.reported(rank, state, code))
            case Bye():
                self._carry_out(controller.bye(rank))
            case Did():
                self._carry_out(controller.did(rank, frame))
            case _:
                raise ProtocolError(f"rank {rank} says Hello twice")

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case To(rank=rank, frame=frame):
                    if (visitor := self._seated.get(rank)) is not None:
                        visitor.send(frame)
                case Timer(round=number, stage=stage):
                    limit_s = _LIMITS_S.get(stage, _ACTION_S)
                    self._loop.call_later(limit_s, self._expire, number, stage)
                case Note(kind=kind, rank=rank, text=text):
                    log.warning("%s%s: %s", kind, f", rank {rank}" if rank >= 0 else "", text)
                case Ended(saved=saved, reason=reason):
                    log.warning("the job ends: %s; %s", reason, f"saved at step {saved}" if saved >= 0 else "not saved")

    def _expire(self, number: int, stage: Stage) -> None:
        self._carry_out(self._controller.expired(number, stage))


class _Visitor:
    """A connection. ``rank``: -1 until it has said Hello."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.rank = -1

    def send(self, frame: wire.FromController) -> None:
        """Never waits: an order is a few hundred bytes."""
        self.writer.write(encode(frame))
