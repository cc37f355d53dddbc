"""The processor: one rank's side of the protocol, as a pure state machine.

It runs in the training thread, which has nothing better to do during a recovery; in a healthy step only ``standing``
moves. The drivers (``session/recovery.py``, and the simulation) do the work that an Action names.
"""

from __future__ import annotations

import enum

from resilient_train.errors import ProtocolError
from resilient_train.protocol.messages import Joined, Plan
from resilient_train.protocol.standing import Phase, Standing


class Action(enum.StrEnum):
    """A rank's own part in a plan."""

    REDO = "redo"
    """Drop the gradients, go back to the start of update ``commits``, run it again."""
    APPLY = "apply"
    """Everyone was READY: apply the gradients, then finish the tail."""
    FINISH_TAIL = "finish_tail"
    """The update is applied already; run the rest of the body to its end, once."""
    COPY = "copy"
    """Copy the state from a replica."""


class Processor:
    """``standing`` is how far this rank has come, ``holds`` whether its replicated state is usable."""

    def __init__(self, rank: int, *, generation: int = 0, holds: bool = True) -> None:
        self.rank = rank
        self.generation = generation
        self.standing = Standing(0, Phase.APPLIED)
        self.holds = holds
        self.tail_done = 0
        self.plan: Plan | None = None

    def advance(self, phase: Phase) -> Standing:
        """The next phase of a healthy step; APPLIED counts the update."""
        commits = self.standing.commits + (1 if phase is Phase.APPLIED else 0)
        following = tuple.__new__(Standing, (commits, phase))  # four times a step: Standing() is a call in Python
        assert following > self.standing, f"rank {self.rank} went back from {self.standing} to {following}"
        if phase is Phase.APPLIED:
            self.tail_done = 0
        self.standing = following
        return following

    def damage(self) -> None:
        """The rank's replicated state has lost data: it must be copied from a replica."""
        self.holds = False

    def join(self, generation: int, groups: tuple[str, ...] = (), stopped_ns: int = 0) -> Joined:
        """A recovery begins. An update that was cut half-way leaves no usable state behind."""
        if generation <= self.generation and self.plan is not None:
            raise ProtocolError(f"rank {self.rank} was asked to join generation {generation} after {self.generation}")
        self.generation = generation
        self.plan = None
        if self.standing.phase is Phase.UPDATING:
            self.holds = False
        commits, phase = self.standing
        return Joined(generation, commits, phase, self.holds, self.tail_done, groups, stopped_ns)

    def accept(self, plan: Plan) -> Action:
        """This rank's part in ``plan``. Raises ProtocolError if the plan can't be meant for this rank."""
        if plan.generation != self.generation:
            raise ProtocolError(
                f"rank {self.rank} is in generation {self.generation}, the plan is of {plan.generation}"
            )
        self.plan = plan
        if not self.holds:
            return Action.COPY
        commits, phase = self.standing
        if commits == plan.commits:
            return Action.FINISH_TAIL if phase is Phase.APPLIED else Action.REDO
        if commits == plan.commits - 1 and phase is Phase.READY:
            return Action.APPLY
        raise ProtocolError(f"rank {self.rank} stands at {self.standing}; no part in a plan for {plan.commits} commits")

    def settle(self) -> Standing:
        """This rank stands at the start of the plan's update: by redo, by finishing the tail, or by copy."""
        assert self.plan is not None
        self.standing = Standing(self.plan.commits, Phase.COMPUTE)
        self.holds = True
        return self.standing

    @property
    def leaves(self) -> bool:
        """Whether the job ends at the head of the plan's update."""
        return self.plan is not None and self.plan.last

    @property
    def sources_for(self) -> tuple[int, ...]:
        """The ranks that copy from this one under the present plan."""
        copies = self.plan.copies if self.plan else {}
        return tuple(target for target, source in sorted(copies.items()) if source == self.rank)
