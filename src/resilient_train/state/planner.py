"""When to save next, in memory and to storage, learnt from a job that runs: ``save_every("auto")``.

Pure, as ``advisor.py``, of which it has one for each kind of checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

from resilient_train.state.advisor import FIRST_STEPS, WORTH, Advisor, behind
from resilient_train.state.interval import Tier
from resilient_train.state.nested import Nested, nested_overhead, nested_steps


class SavePlan(NamedTuple):
    """Steps between saves in memory, and, a multiple, between saves that go to storage as well."""

    memory_steps: int
    storage_steps: int


class Planner:
    """Gives the two intervals, in whole steps.

    ``memory`` is for the failures that a snapshot in memory does for, ``storage`` for the others. ``restart_s``: see
    ``Tier``; it changes no interval, only the cost that is told.
    """

    def __init__(self, memory: Advisor, storage: Advisor, *, restart_s: float = 0.0) -> None:
        self.memory = memory
        self.storage = storage
        self._restart_s = restart_s
        self._plan = SavePlan(FIRST_STEPS, 2 * FIRST_STEPS)

    def step(self, duration_s: float) -> None:
        """As ``Advisor.step``."""
        self.memory.step(duration_s)
        self.storage.step(duration_s)

    def kept(self, stall_s: float) -> None:
        """A save in memory, and the training time that it cost."""
        self.memory.save(stall_s)

    def stored(self, stall_s: float, latency_s: float) -> None:
        """A save that went to storage ``latency_s`` after its begin, and what it cost all in all; what it would have
        cost in memory is taken off.
        """
        memory = self.memory.tier
        more_s = max(0.0, stall_s - memory.stall_s) if memory else stall_s
        self.storage.save(more_s, behind(stall_s, latency_s))

    def tiers(self) -> tuple[Tier, Tier] | None:
        """What was measured of both; None before each of them has been."""
        memory, storage = self.memory.tier, self.storage.tier
        return (memory, storage) if memory and storage else None

    def plan(self) -> SavePlan:
        """The intervals to keep from now on: asked after each save to storage, they change seldom (``WORTH``)."""
        tiers, step_s = self.tiers(), self.storage.step_s
        if tiers is None or not step_s:
            return self._plan
        best = SavePlan(*nested_steps(*tiers, step_s))
        present = self._plan
        kept = present.memory_steps * step_s >= tiers[0].shortest_s
        kept = kept and present.storage_steps * step_s >= tiers[1].shortest_s
        if not kept or _overhead(present, tiers, step_s) > WORTH * _overhead(best, tiers, step_s):
            self._plan = best
        return self._plan

    def cost(self) -> float:
        """What the plan costs, restarts too, as a fraction of the training time. Only after both were measured."""
        tiers, step_s = self.tiers(), self.storage.step_s
        assert tiers is not None
        assert step_s is not None
        memory, storage = tiers
        extra = self._restart_s * (1 / memory.mtbf_s + 1 / storage.mtbf_s)
        return _overhead(self._plan, tiers, step_s) + extra


def _overhead(plan: SavePlan, tiers: tuple[Tier, Tier], step_s: float) -> float:
    count = plan.storage_steps // plan.memory_steps
    return nested_overhead(Nested(plan.memory_steps * step_s, count), *tiers)
