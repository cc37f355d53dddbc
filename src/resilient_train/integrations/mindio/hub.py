"""The controller's port: connections of processors, whose words feed ``controller.py``.

It runs in an event loop: that of ``resilient-run``, or one in a thread of its own (``HubThread``) where a script starts
the controller itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from resilient_train.errors import ConfigError, ProtocolError
from resilient_train.integrations.mindio import wire
from resilient_train.integrations.mindio.controller import (
    Effect,
    MindioController,
    MindioStage,
    MindXCall,
    Notice,
    Recoveries,
    Timer,
    To,
    TrainingEnded,
    outcome,
)
from resilient_train.integrations.mindio.frames import (
    Bye,
    Did,
    FromProcessor,
    ProcessorHello,
    Replicas,
    Reported,
    Status,
    TrainingOver,
)
from resilient_train.integrations.mindio.mindx import MindX
from resilient_train.integrations.mindio.mindx_controller import MindXController, OrderError
from resilient_train.transport import FrameBuffer, decode, encode

log = logging.getLogger("resilient_train.mindio")

_MINUTE_S = 60.0
_ACTION_S = 180.0
"""MindIO's TTP_NORMAL_ACTION_TIME_LIMIT."""
_LIMITS_S = {
    MindioStage.LOCKING: 30.0,
    MindioStage.HALTING: 10 * _MINUTE_S,
    MindioStage.JOINING: 10 * _MINUTE_S,
    MindioStage.REBUILDING: 10 * _MINUTE_S,
    MindioStage.SAVING: 30 * _MINUTE_S,
}
"""How long each stage may take, as MindIO has it; the others _ACTION_S."""
_GREETING_S = 10.0
_OBEYED_S = 10.0
_STRANGERS_MAX = 64


Told = Callable[[Notice | TrainingEnded], object]


def log_it(event: Notice | TrainingEnded) -> None:
    """What people hear where there is nobody to tell them better."""
    if isinstance(event, TrainingEnded):
        log.warning("the job ends: %s; %s", event.reason, outcome(event.saved, event.unnamed) or "not saved")
    else:
        log.warning("%s%s: %s", event.kind, f", rank {event.rank}" if event.rank >= 0 else "", event.text)


class Hub:
    """Listens from when it is made; answers from ``open`` to ``close``."""

    def __init__(
        self,
        address: str,
        port: int,
        world_size: int,
        policy: Recoveries,
        secret: bytes = b"",
        told: Told = log_it,
        mindx: MindX | None = None,
    ) -> None:
        """``mindx``, if it is there, decides about faults.

        Raises ConfigError for an address that can't be listened at.
        """
        wire.check_bind(address, secret)
        self._secret, self._world_size, self._told = secret, world_size, told
        self._mindx = mindx
        self.controller = (
            MindioController(world_size, policy) if mindx is None else MindXController(world_size, policy, mindx.wait_s)
        )
        """For others to look at."""
        self._seated: dict[int, _Visitor] = {}
        self.known: set[int] = set()
        """Ranks that have ever come."""
        self._visitors: set[_Visitor] = set()
        try:
            self._listening = socket.create_server((address, port), backlog=1024)
        except OSError as error:
            raise ConfigError(f"the controller can't listen at {address}:{port}: {error.strerror}") from None
        self.port: int = self._listening.getsockname()[1]
        self._closed = False

    async def open(self) -> None:
        """Begins to answer, in the running loop."""
        loop = asyncio.get_running_loop()
        if self._mindx is not None:
            self._mindx.start(lambda reason: loop.call_soon_threadsafe(self._forsaken, reason))
        self._server = await asyncio.start_server(self._serve, sock=self._listening)

    async def close(self) -> None:
        """Ends all connections; ranks are told."""
        self._closed = True
        if self._mindx is not None:
            self._mindx.close()
        for each in self._seated.values():
            each.send(TrainingOver())
        self._server.close()
        visitors = list(self._visitors)
        for visitor in visitors:
            visitor.writer.close()
            visitor.task.cancel()
        await asyncio.gather(*(visitor.task for visitor in visitors), return_exceptions=True)

    async def hear_out(self, rank: int, limit_s: float) -> bool:
        """Its process has ended: takes in what it had said before, for as long as that may take.

        Returns whether it owes nothing: its training was over, or it never came.
        """
        visitor = self._seated.get(rank)
        if visitor is not None:
            await asyncio.wait((visitor.task,), timeout=limit_s)
            self._give_seat_up(visitor)
        return rank not in self.known or self.controller.seats[rank].left

    def leave(self, reason: str) -> None:
        """The job is to end, behind a checkpoint."""
        self._carry_out(self.controller.leave(reason))

    def pause(self) -> None:
        """All are to stand still behind an update, until ``unpause``."""
        self._carry_out(self.controller.pause())

    def unpause(self) -> None:
        """All are to go on."""
        self._carry_out(self.controller.unpause())

    def give_up_step(self, why: str) -> None:
        """No rank comes to its end: all are to do it over."""
        self._carry_out(self.controller.stalled(why))

    def obey(self, order: Callable[[MindXController], list[Effect]]) -> None:
        """Something that MindX wants. Raises OrderError where it can't be done."""
        if not isinstance(self.controller, MindXController):
            raise OrderError("the controller decides by itself: MindX had not registered its callbacks")
        self._carry_out(order(self.controller))

    def _forsaken(self, reason: str) -> None:
        self.obey(lambda controller: controller.forsaken(reason))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        visitor = _Visitor(writer, task)
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
            self._give_seat_up(visitor)

    def _give_seat_up(self, visitor: _Visitor) -> None:
        visitor.writer.close()
        if not self._closed and self._seated.get(visitor.rank) is visitor:
            del self._seated[visitor.rank]
            self._carry_out(self.controller.gone(visitor.rank))

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
        if not isinstance(frame, ProcessorHello) or not wire.is_proven(self._secret, number, frame):
            raise ProtocolError("a stranger")
        if frame.world_size != self._world_size or not 0 <= frame.rank < self._world_size:
            raise ProtocolError(f"rank {frame.rank} of {frame.world_size} comes to a job of {self._world_size} ranks")
        before = self._seated.get(frame.rank)
        if before is not None:
            if self.controller.stage is MindioStage.STARTING:
                raise ProtocolError(f"rank {frame.rank} is there already")
            before.writer.close()
        self._seated[frame.rank] = visitor
        self.known.add(frame.rank)
        visitor.rank = frame.rank
        self._carry_out(self.controller.hello(frame.rank))

    def _on_frame(self, rank: int, frame: FromProcessor) -> None:
        controller = self.controller
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
                case Timer(round=number, stage=stage, limit_s=given_s):
                    limit_s = given_s or _LIMITS_S.get(stage, _ACTION_S)
                    asyncio.get_running_loop().call_later(limit_s, self._expire, number, stage)
                case MindXCall():
                    assert self._mindx is not None, "nobody else is asked"
                    self._mindx.report(effect)
                case Notice() | TrainingEnded():
                    self._told(effect)

    def _expire(self, number: int, stage: MindioStage) -> None:
        self._carry_out(self.controller.expired(number, stage))


class HubThread:
    """A hub in a thread of its own, until ``close``."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rt-mindio-hub", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._hub.open())
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._hub.close())
            self._loop.close()

    def obey(self, order: Callable[[MindXController], list[Effect]]) -> None:
        """As the hub's, from another thread."""
        done: Future[None] = Future()

        def act() -> None:
            try:
                self._hub.obey(order)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:
            raise OrderError("the controller is closed") from None
        try:
            done.result(_OBEYED_S)
        except TimeoutError:
            raise OrderError(f"the controller has done nothing for {_OBEYED_S:g} s: is it being closed?") from None

    def close(self) -> None:
        """Ends the thread and all connections; ranks are told."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class _Visitor:
    """A connection, and the task that listens to it. ``rank``: -1 until it has said ProcessorHello."""

    def __init__(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        self.writer, self.task = writer, task
        self.rank = -1

    def send(self, frame: wire.FromController) -> None:
        """Never waits: an order is a few hundred bytes."""
        self.writer.write(encode(frame))
