"""Faults on request: carries out the clauses of a plan that are meant for this process."""

from __future__ import annotations

import collections
import itertools
import os
import signal
from collections.abc import Callable, Sequence

from resilient_train.events import now
from resilient_train.faults import FROM_OUTSIDE, Injection
from resilient_train.frameworks.base import Framework
from resilient_train.observe.sinks import Sink

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
"""Kinds that need nothing of the engine's."""


class Injector:
    """``at`` is called wherever a fault can be injected; each clause hits once."""

    def __init__(
        self,
        plan: Sequence[Injection],
        rank: int,
        incarnation: int,
        sink: Sink,
        engine: Framework,
    ) -> None:
        self._clauses = [each for each in plan if each.rank == rank and each.incarnation == incarnation]
        self._rank = rank
        self._incarnation = incarnation
        self._sink = sink
        self._acts: dict[str, Act] = {
            **ACTS,
            "hcce": lambda _: engine.break_collectives(),
            "uce": lambda clause: engine.poison(clause.target),
        }

    def at(self, phase: str, place: str, *, step: int = -1, generation: int = -1) -> None:
        """This process is at ``place`` of ``phase``: a clause that says so hits it now."""
        for clause in self._clauses:
            if (clause.phase, clause.at) != (phase, place):
                continue
            if clause.step not in (-1, step) or clause.generation not in (-1, generation):
                continue
            self._clauses.remove(clause)
            detail = {"kind": clause.kind, "at": place}
            event = now(
                "injected", rank=self._rank, incarnation=self._incarnation, step=step, phase=phase, detail=detail
            )
            self._sink.write(event)
            self._acts[clause.kind](clause)
            return

    def hook_into(self, engine: Framework, step: Callable[[], int]) -> None:
        """Has the engine call at the places that lie inside its own code."""
        for place, hook in (("forward", engine.call_in_forward), ("backward", engine.call_in_backward)):
            if any(each.at == place for each in self._clauses):
                hook(self.caller("COMPUTE", place, step))

    def caller(self, phase: str, place: str, step: Callable[[], int]) -> Callable[[], None]:
        """A function of no arguments that is ``at(phase, place)`` for the step that runs then."""
        return lambda: self.at(phase, place, step=step())
