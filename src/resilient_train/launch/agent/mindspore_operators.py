"""What a command (``resilient-train status``, ``inject``, ``pause``, ``resume``) may ask of a MindSpore job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from resilient_train.errors import ProtocolError
from resilient_train.integrations.mindio.controller import MindioStage
from resilient_train.integrations.mindio.hub import Hub
from resilient_train.integrations.mindspore.rank_folder import NOBODY, AgentFolder
from resilient_train.launch.agent.processes import RankProcess
from resilient_train.protocol import messages as m
from resilient_train.session.injection import SIGNALS
from resilient_train.transport import from_rank
from resilient_train.unix_listener import SMALL, Connection, Server

_WORDS = {
    MindioStage.STARTING: "STARTING",
    MindioStage.TRAINING: "RUNNING",
    MindioStage.HALTING: "RUNNING",
    MindioStage.PAUSED: "PAUSED",
    MindioStage.SAVING: "LEAVING",
    MindioStage.RENAMING: "LEAVING",
    MindioStage.OVER: "ENDED",
}
"""The stages as jobs of all frameworks have them; all others are a recovery's."""


class MindSporeOperators(Server[m.FromRank]):
    """``running``: by rank, the processes that live. ``note`` writes an event."""

    decoder = from_rank
    greeting = m.Hello

    def __init__(
        self, hub: Hub, own: AgentFolder, running: Mapping[int, RankProcess], note: Callable[..., None]
    ) -> None:
        self._hub, self._own, self._running, self._note = hub, own, running, note
        self._stands_since = 0.0

    def paused(self) -> None:
        """All have come to stand."""
        self._stands_since = time.monotonic()

    def stood_s(self) -> float:
        """How long all have stood, or had stood."""
        return round(time.monotonic() - self._stands_since, 1)

    def on_frame(self, connection: Connection[m.FromRank], frame: m.FromRank) -> None:
        match frame:
            case m.Hello(role="operator", version=m.PROTOCOL_VERSION):
                connection.admit(SMALL)
            case m.Hello():
                raise ProtocolError(f"{frame.role} of version {frame.version}: ranks of MindSpore do not come here")
            case m.Query():
                connection.send(m.Reply(status=self._status()))
            case m.Inject():
                connection.send(self._inject(frame))
            case m.Pause():
                connection.send(self._pause(frame))
            case m.Unpause():
                connection.send(self._unpause())
            case _:
                connection.send(m.Reply(error=f"an operator can't send {type(frame).__name__}"))

    def on_foreign(self, connection: Connection[m.FromRank] | None, text: str) -> None:  # noqa: ARG002 - Server's
        self._note("foreign_frame", detail={"text": text})

    def _status(self) -> dict[str, Any]:
        job = self._hub.controller
        return {
            "stage": self._stage(),
            "in": job.stage.name,
            "waits_for": sorted(job.pending),
            "generation": job.round,
            "ranks": [self._rank(rank) for rank in range(len(job.seats))],
        }

    def _stage(self) -> str:
        if self._own.stand_behind() != NOBODY:
            return "PAUSED"
        if not self._hub.known and self._own.ranks():
            return "RUNNING"
        return _WORDS.get(self._hub.controller.stage, "RECOVERING")

    def _rank(self, rank: int) -> dict[str, Any]:
        seat, process = self._hub.controller.seats[rank], self._running.get(rank)
        own = [] if self._hub.known else self._own.ranks()
        return {
            "rank": rank,
            "pid": process.pid if process is not None else None,
            "incarnation": process.incarnation if process is not None else None,
            "commits": own[rank].step if own else seat.step,
            "updating": seat.updating,
            "reported": seat.reported.name if seat.reported is not None else None,
        }

    def _inject(self, frame: m.Inject) -> m.Reply:
        process = self._running.get(frame.rank)
        if frame.kind not in SIGNALS:
            return m.Reply(
                error=f"{frame.kind} can't be injected into a rank of MindSpore: {' and '.join(SIGNALS)} can"
            )
        if process is None or not 0 <= frame.rank < len(self._hub.controller.seats):
            return m.Reply(error=f"rank {frame.rank} is not running now")
        detail = {"kind": frame.kind, "at": "operator"}
        self._note("injected", rank=frame.rank, incarnation=process.incarnation, detail=detail)
        process.signal(SIGNALS[frame.kind])
        step = self._hub.controller.seats[frame.rank].step
        return m.Reply(status={"pid": process.pid, "incarnation": process.incarnation, "step": step})

    def _pause(self, frame: m.Pause) -> m.Reply:
        job = self._hub.controller
        if not job.policy.pause:
            return m.Reply(error="MindSpore's ranks stand still with TSP:1 or ARF:1 in MS_ENABLE_TFT only")
        if frame.step >= 0:
            return m.Reply(error="a MindSpore job stops behind its next update, and not before a given step")
        own = [] if self._hub.known else self._own.ranks()
        starts_or_ends = job.stage in (
            MindioStage.STARTING,
            MindioStage.SAVING,
            MindioStage.RENAMING,
            MindioStage.OVER,
        )
        if not own and (starts_or_ends or job.hopeless):
            return m.Reply(error=f"the job does not train: it is {self._stage()}")
        if any(seat.left for seat in own or job.seats):
            return m.Reply(error="ranks have come to the end of their training")
        if self._own.asked if own else job.pauses:
            return m.Reply(error="a pause is asked for already")
        self._note("pause_asked", detail={"by": "operator", "at_step": 0})
        (self._own if own else self._hub).pause()
        return m.Reply(status={"stage": self._stage()})

    def _unpause(self) -> m.Reply:
        if self._own.asked:
            return self._unpause_own()
        job = self._hub.controller
        if not job.pauses:
            return m.Reply(error=f"no pause is asked for; the job is {self._stage()}")
        stood_s = self.stood_s() if job.stage is MindioStage.PAUSED else 0.0
        status: dict[str, object] = {"was": self._stage(), "step": job.target, "paused_s": stood_s}
        self._hub.unpause()
        return m.Reply(status=status)

    def _unpause_own(self) -> m.Reply:
        step, was = self._own.stand_behind(), self._stage()
        self._own.unpause()
        if step == NOBODY:
            self._note("pause_withdrawn", detail={"reason": "nobody wants it any more"})
            return m.Reply(status={"was": was, "step": 0, "paused_s": 0.0})
        stood_s = self.stood_s()
        self._note("resumed", detail={"reason": "the pause is over", "step": step, "paused_s": stood_s})
        return m.Reply(status={"was": was, "step": step, "paused_s": stood_s})
