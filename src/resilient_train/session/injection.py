"""Faults on request: carries out the clauses of a plan that are meant for this process, and an operator's orders.

An order (``resilient-train inject``) is one more clause, which hits in the step that begins next. It is looked for with
one load of shared memory a step; see ``docs/decisions/0016-orders.md``.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import signal
from collections.abc import Callable, Sequence

from resilient_train.events import now
from resilient_train.faults import (
    ANOMALIES,
    FLIP,
    FROM_OUTSIDE,
    RECOVERY_PHASES,
    SLOW,
    Injection,
    place_in_step,
)
from resilient_train.frameworks.roles import Drill
from resilient_train.observe.sinks import Sink
from resilient_train.protocol import orders
from resilient_train.protocol import rank_effects as do
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.rank import Rank
from resilient_train.protocol.standing import Phase
from resilient_train.session.peers import Peers

SIGNALS = dict(zip(FROM_OUTSIDE, (signal.SIGKILL, signal.SIGSTOP), strict=True))


Act = Callable[[Injection], None]


def _signal_self(number: int) -> Act:
    return lambda _clause: os.kill(os.getpid(), number)


def _loop_for_ever(_clause: Injection) -> None:
    """In C, without a look at signals and without letting the GIL go."""
    collections.deque(itertools.repeat(None), maxlen=0)


ACTS: dict[str, Act] = {
    **{kind: _signal_self(number) for kind, number in SIGNALS.items()},
    "loop": _loop_for_ever,
}
"""Kinds that need no ``Drill``."""
_RAISING = "uce"
"""The kind that raises, as an operation of the device's does: so only where the user's code, or a hook, runs."""
_BEFORE = {
    do.CheckCollectives: ("READY", "before"),
    do.Cross: ("READY", "barrier"),
    do.Committed: ("UPDATING", "end"),
    do.Quiesce: ("STOP", "start"),
    do.BuildGroups: ("REBUILD", "start"),
    do.SendDone: ("RESTORE", "end"),
}
_AFTER = {do.Cross: ("UPDATING", "start"), do.BuildGroups: ("REBUILD", "end")}
"""Places, by effect; those behind one count only if it went well."""


def _left(rank: Rank) -> int:
    """The step in which a recovery found this rank, or behind which."""
    return rank.number - (rank.standing.phase is Phase.APPLIED)


class Injector:
    """Hits at places of a step, and before and behind effects of the rank machine; each clause hits once.

    Nothing but ``listen`` need be called where there are no ``clauses``. ``falsify``: the anomaly check is to see
    this norm, or this loss. ``slow_down``: bodies are to take so many times as long.
    """

    def __init__(
        self,
        plan: Sequence[Injection],
        rank: int,
        incarnation: int,
        sink: Sink,
        drill: Drill,
        peers: Peers,
        falsify: Callable[[str, float], None],
        slow_down: Callable[[float], None],
    ) -> None:
        self.clauses = [each for each in plan if each.rank == rank and each.incarnation == incarnation]
        self._rank = rank
        self._incarnation = incarnation
        self._sink = sink
        self._drill = drill
        self._peers = peers
        self._owner_pid = os.getpid()
        self._ordered: tuple[Injection, orders.FaultOrder] | None = None
        self._hooks: dict[str, Callable[[], None]] = {}
        self._generation: Callable[[], int] = lambda: 0
        self._acts: dict[str, Act] = {
            **ACTS,
            "hcce": lambda _: drill.cut(),
            "uce": lambda clause: drill.poison(clause.target),
            **{kind: lambda clause: falsify(clause.kind, clause.value) for kind in ANOMALIES},
            SLOW: lambda clause: slow_down(clause.value),
            FLIP: self._flip,
        }

    # -- places

    def listen(self, step: int) -> None:
        """A step begins: an operator's order hits in it."""
        if self._peers.order() != orders.LISTENING:
            self._look_for_order(step)

    def asked(self, event: on.RankEvent, rank: Rank) -> None:
        """The user's code has come here, and the machine is about to hear of it."""
        match event:
            case on.Enter():
                self.at("COMPUTE", "start", step=rank.number)
            case on.Exit(how="ok") if rank.standing.phase is Phase.APPLIED:
                self.at("APPLIED", "end", step=rank.number - 1)
            case on.Exit(how="ok") if rank.standing.phase is Phase.COMPUTE and not rank.written:
                self.at("COMPUTE", "end", step=rank.number)
            case on.Next() | on.Over() if rank.standing.phase is Phase.APPLIED:
                self.at("BETWEEN", "start", step=rank.number)

    def answered(self, event: on.RankEvent, rank: Rank) -> None:
        """The thread goes back to the user's code, or to an optimizer: where an operation of the device can raise."""
        step = _left(rank)
        if isinstance(event, on.UpdateBegins):
            self.at("UPDATING", "start", step=step, raising=True)
        elif isinstance(event, on.UpdateEnds):
            self.at("APPLIED", "start", step=step, raising=True)

    def before(self, effect: do.Effect, rank: Rank) -> None:
        """The effect is about to be performed."""
        place = _BEFORE.get(type(effect))
        if place is None:
            return
        if isinstance(effect, do.Quiesce):
            self.at(*place, step=_left(rank), generation=self._peers.stop_generation)
        elif isinstance(effect, do.BuildGroups):
            self.at(*place, step=_left(rank), generation=effect.plan.generation)
        elif isinstance(effect, do.SendDone):
            self.at(*place, step=_left(rank))
        else:  # by the time of Committed the update counts already
            self.at(*place, step=rank.number - isinstance(effect, do.Committed))

    def after(self, effect: do.Effect, outcome: on.RankEvent | None, rank: Rank) -> None:
        """The effect was performed."""
        if isinstance(effect, do.Record) and rank.standing.phase is Phase.APPLIED:
            self.at("APPLIED", "start", step=rank.number - 1)
        elif (place := _AFTER.get(type(effect))) is not None and isinstance(outcome, on.Ok):
            self.at(*place, step=_left(rank) if isinstance(effect, do.BuildGroups) else rank.number)

    def at(self, phase: str, place: str, *, step: int = -1, generation: int = -1, raising: bool = False) -> None:
        """At ``place`` of ``phase``: a clause that says so hits this process. ``raising``: one that raises. ``step``:
        in a recovery, a clause for that one or an earlier one hits, or for none.
        """
        in_hook = phase in ("UPDATING", "APPLIED") and place == "start"
        for clause in self.clauses:
            if (clause.phase, clause.at) != (phase, place):
                continue
            if in_hook and (clause.kind == _RAISING) != raising:
                continue
            if (step < clause.step) if phase in RECOVERY_PHASES else (step != clause.step):
                continue
            if clause.generation not in (-1, generation if generation >= 0 else self._generation()):
                continue
            self.clauses.remove(clause)
            self._hit(clause)
            return

    def _hit(self, clause: Injection) -> None:
        detail: dict[str, object] = {"kind": clause.kind, "at": clause.at}
        ordered = self._ordered is not None and self._ordered[0] is clause
        if self._ordered is not None and ordered:
            detail["order"] = self._ordered[1].number
            self._ordered = None
        where = {"rank": self._rank, "incarnation": self._incarnation, "step": clause.step, "phase": clause.phase}
        self._sink.write(now("injected", **where, detail=detail))
        if ordered:
            self._peers.set_order(orders.LISTENING)
        self._acts[clause.kind](clause)

    def _flip(self, clause: Injection) -> None:
        detail = self._drill.flip(clause.target, clause.index, clause.mask)
        where = {"rank": self._rank, "incarnation": self._incarnation, "step": clause.step, "phase": clause.phase}
        self._sink.write(now("flipped", **where, detail=detail))

    # -- orders

    def _look_for_order(self, step: int) -> None:
        """A step begins. An order that did not hit in the step before (it was cut, say) is meant for this one."""
        word = self._peers.order()
        if word == orders.LISTENING:
            return
        order = orders.unpack(word)
        if order is None:
            return
        if self._ordered is not None:
            self.clauses = [each for each in self.clauses if each is not self._ordered[0]]
        phase, place = place_in_step(order.kind, order.target)
        clause = Injection(order.kind, self._rank, phase, place, step=step, target=order.target)
        self._ordered = clause, order
        self.add(clause)

    def add(self, clause: Injection) -> None:
        """One more, for this process."""
        self.clauses.append(clause)
        if clause.at in self._hooks:
            self._hooks.pop(clause.at)()

    def open(self, step: Callable[[], int], generation: Callable[[], int]) -> None:
        """The loop begins: faults can hit inside the framework's own code, and an operator may order some."""
        self._generation = generation
        for place, hook in (("forward", self._drill.call_in_forward), ("backward", self._drill.call_in_backward)):
            self._hooks[place] = functools.partial(hook, self.caller("COMPUTE", place, step))
        for place in list(self._hooks):  # the others cost each pass a call, so they wait until an order needs them
            if any(each.at == place for each in self.clauses):
                self._hooks.pop(place)()
        self._peers.set_order(orders.LISTENING)

    def close(self) -> None:
        """No order is taken any more. Idempotent; in a forked child, nothing."""
        if os.getpid() == self._owner_pid:
            self._peers.set_order(orders.NOBODY)

    def caller(self, phase: str, place: str, step: Callable[[], int]) -> Callable[[], None]:
        """A function of no arguments that is ``at(phase, place)`` for the step that runs then."""
        return lambda: self.at(phase, place, step=step())
