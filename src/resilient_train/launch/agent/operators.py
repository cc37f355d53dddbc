"""What an operator's connection (``resilient-train status``, ``inject``, ``pause``) may ask, and the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilient_train._native import Board
from resilient_train.errors import ConfigError
from resilient_train.faults import check_fault
from resilient_train.launch.agent.pauses import Pauses
from resilient_train.launch.agent.processes import Processes, RankProcess
from resilient_train.launch.agent.straggler_watch import StragglerWatch
from resilient_train.launch.agent.waiting import Waiting
from resilient_train.protocol import messages as m
from resilient_train.protocol import orders
from resilient_train.protocol.job import Job
from resilient_train.session.injection import SIGNALS
from resilient_train.unix_listener import Connection


class Operators:
    """``note(kind, rank=..., ...)`` writes an event."""

    def __init__(
        self,
        board: Board,
        job: Job,
        processes: Processes,
        waiting: Waiting,
        pauses: Pauses,
        straggler_watch: StragglerWatch,
        note: Callable[..., None],
    ) -> None:
        self._board = board
        self._job = job
        self._processes = processes
        self._waiting = waiting
        self._pauses = pauses
        self._straggler_watch = straggler_watch
        self._note = note
        self._orders = 0

    def answer(self, connection: Connection[m.FromRank], frame: m.FromRank) -> None:
        """Does what the frame asks for, or says why not. Only Hello has no answer."""
        match frame:
            case m.Hello():
                return
            case m.Query():
                connection.send(m.Reply(status=self._status()))
            case m.Inject():
                connection.send(self._inject(frame))
            case m.Pause() | m.Unpause():
                connection.send(self._pauses.answer(frame))
            case _:
                connection.send(m.Reply(error=f"an operator can't send {type(frame).__name__}"))

    def _inject(self, frame: m.Inject) -> m.Reply:
        rank = frame.rank
        try:
            check_fault(frame.kind, frame.target)
        except ConfigError as error:
            return m.Reply(error=str(error))
        if not 0 <= rank < self._board.world_size:
            return m.Reply(error=f"there is no rank {rank}; the job has ranks 0 to {self._board.world_size - 1}")
        process = self._processes.current.get(rank)
        if process is None or process.exit_code() is not None:
            return m.Reply(error=f"rank {rank} is not running now")
        if frame.kind in SIGNALS:
            return self._signal(frame.kind, process)
        return self._order(frame, process)

    def _signal(self, kind: str, process: RankProcess) -> m.Reply:
        rank, step = process.rank, self._board.step(process.rank)
        detail = {"kind": kind, "at": "operator"}
        self._note("injected", rank=rank, incarnation=process.incarnation, step=step, detail=detail)
        process.signal(SIGNALS[kind])
        return m.Reply(status={"pid": process.pid, "incarnation": process.incarnation, "step": step})

    def _order(self, frame: m.Inject, process: RankProcess) -> m.Reply:
        """Leaves the order where the rank looks when its next step begins; the rank writes the event when it hits."""
        rank = process.rank
        number = self._orders % orders.NUMBER_MAX + 1
        word = orders.pack(orders.FaultOrder(number, frame.kind, frame.target))
        if not self._board.exchange_order(rank, orders.LISTENING, word):
            if self._board.order(rank) == orders.NOBODY:
                why = (
                    f"it is in no loop of a Session now (the job is {self._job.stage.value}), and {frame.kind} "
                    "happens inside one; kill and stop work always"
                )
            else:
                why = "it has not come to the fault that was ordered before; kill and stop work always"
            return m.Reply(error=f"rank {rank} can't be hit: {why}")
        self._orders = number
        return m.Reply(status={"pid": process.pid, "incarnation": process.incarnation, "order": number})

    def _status(self) -> dict[str, Any]:
        job = self._job
        return {
            "stage": job.stage.value,
            **self._waiting.status(),
            **self._pauses.status(),
            **self._straggler_watch.status(),
            "generation": job.generation,
            "restarts": job.attempt,
            "replacements": job.replacements,
            "max_restarts": job.policy.max_restarts,
            "ranks": [self._waiting.rank(rank) for rank in range(self._board.world_size)],
            "standbys": self._processes.standbys(),
        }
