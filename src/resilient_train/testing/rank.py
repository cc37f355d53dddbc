"""One simulated rank: the session's driver (``session/runtime``, ``session/recovery``) as a table of transitions.

Every place at which a real rank can be killed, delayed or interrupted with a different outcome is a state of its own;
what happens in between and is seen by nobody else is one transition. Healthy steps are in ``stepping``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient_train.protocol import messages as m
from resilient_train.protocol.processor import Action
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.testing import values
from resilient_train.testing.checks import require
from resilient_train.testing.stepping import WORLD, At, Stepping

if TYPE_CHECKING:
    from resilient_train.testing.cluster import World

__all__ = ["At", "SimRank"]

_INTERRUPTIBLE = (At.COMPUTE, At.REDUCE, At.REDUCED)
_STOPPABLE = (At.BARRIER, At.IN_TAIL, At.WAIT_STOP, At.IN_REPLAY, At.GHOST, At.IN_GHOST)
_IN_COLLECTIVE = {At.IN_TAIL: "has the result", At.IN_REPLAY: "has repeated", At.IN_GHOST: "has stood in"}
_RECEIVING = (At.WAIT_START, At.FINISHING, At.AWAIT_PLAN, At.AWAIT_OFFER, At.AWAIT_RESUME)
_SIMPLE = {
    At.BOOT: "connects",
    At.HEAD: "is at the head",
    At.COMPUTE: "reduces",
    At.REDUCED: "publishes",
    At.PUBLISHED: "arrives",
    At.UPDATING: "applies",
    At.TAIL: "calls",
    At.REPLAY: "repeats",
    At.SETTLE: "settles",
    At.REPORT: "reports",
}
"""Places that are left in one way, at any time."""
_WANTED: dict[At, type[Any]] = {
    At.WAIT_START: m.Resume,
    At.AWAIT_PLAN: m.Plan,
    At.AWAIT_OFFER: m.Offer,
    At.AWAIT_RESUME: m.Resume,
}


class SimRank(Stepping):
    """The process of one rank, from its start to its death."""

    __slots__ = ()

    # -- which transitions there are

    def moves(self, world: World) -> list[str]:
        """What this rank may do next."""
        at = self.at
        if at in _SIMPLE:
            names = [_SIMPLE[at]]
            if at in _INTERRUPTIBLE and self._stopped(world):
                names.append("is interrupted")
            return names
        if at in _RECEIVING:
            return ["receives"] if self._relevant(world) is not None else []
        stopped = self._stopped(world)
        if at is At.BEGIN:
            return ["takes part"] if stopped else ["begins"]
        if at is At.BUILDING:
            # What was built before a stop is not used after it.
            return ["takes part again"] if stopped else ["has built"] * world.complete(self, WORLD)
        if at is At.COPYING:
            assert self.offer is not None
            source = world.ranks[self.offer.source]
            names = ["copies"] if source.alive and source.incarnation == self.offer.pid else []
            return names + ["takes part again"] * (stopped and not names)
        names = ["is stopped"] if stopped and at in _STOPPABLE else []
        if at is At.REDUCE:
            names = ["is interrupted"] * stopped + ["has reduced"] * world.complete(self, world.shard[self.rank])
        elif at is At.BARRIER and world.all_reached(self.rank, Standing(self.processor.standing.commits, Phase.READY)):
            names.append("passes")
        elif at in _IN_COLLECTIVE and world.complete(self, WORLD):
            names.append(_IN_COLLECTIVE[at])
        elif at is At.GHOST and not stopped:
            names += self._ghost_moves(world)
        return names

    def do(self, world: World, name: str) -> None:
        """One transition."""
        if name in ("is interrupted", "takes part", "takes part again", "is stopped"):
            self._take_part(world)
            return
        steps: dict[At, Any] = {
            At.BOOT: self._connect, At.HEAD: self._head, At.BEGIN: self._begin, At.COMPUTE: self._reduce,
            At.REDUCE: self._reduced, At.REDUCED: self._publish, At.PUBLISHED: self._arrive, At.BARRIER: self._update,
            At.UPDATING: self._apply, At.TAIL: self._call, At.IN_TAIL: self._called, At.BUILDING: self._built,
            At.REPLAY: self._repeat, At.IN_REPLAY: self._repeated, At.SETTLE: self._settle, At.GHOST: self._stand_in,
            At.IN_GHOST: self._stood_in, At.COPYING: self._copy_state, At.REPORT: self._report,
        }  # fmt: skip
        if self.at in _RECEIVING:
            self._receive(world)
        else:
            steps[self.at](world)

    # -- recovery: STOP to REBUILD

    def _take_part(self, world: World) -> None:
        if self.at in (At.BARRIER, At.IN_TAIL):
            self.place = "barrier" if self.at is At.BARRIER else "tail"
        if self.place == "tail":
            self.processor.tail_done = self.tail_completed
        generation = world.stop_generation
        require(generation > self.processor.generation, f"rank {self.rank} takes part without a stop")
        world.send(self, self.processor.join(generation, ("world",)))
        # Frames of older recoveries would be skipped one by one.
        queue = world.down[self.rank]
        world.down[self.rank] = tuple(f for f in queue if _generation_of(f) >= generation + isinstance(f, m.Stop))
        self.calls = dict.fromkeys((WORLD, world.shard[self.rank]), 0)
        self.action = self.offer = None
        self.at = At.AWAIT_PLAN

    def _relevant(self, world: World) -> int | None:
        """Index of the first frame that this rank waits for."""
        generation = self.processor.generation
        for index, frame in enumerate(world.down[self.rank]):
            if isinstance(frame, m.Stop) and frame.generation > generation:
                return index
            if self.at is At.FINISHING and isinstance(frame, m.Finished):
                return index
            if isinstance(frame, _WANTED.get(self.at, ())) and _generation_of(frame) == generation:
                return index
        return None

    def _receive(self, world: World) -> None:
        index = self._relevant(world)
        assert index is not None
        frame = world.down[self.rank][index]
        # An offer may come while others are waited for; it is put back. All else that was passed over is stale.
        kept = tuple(f for f in world.down[self.rank][:index] if isinstance(f, m.Offer))
        world.down[self.rank] = kept + world.down[self.rank][index + 1 :]
        if isinstance(frame, m.Finished):
            self.at = At.LEFT
            self.connected = False
        elif isinstance(frame, m.Stop):
            if self.at is At.FINISHING:
                self.at = At.BEGIN
            elif self.at is not At.WAIT_START:
                self._take_part(world)
        elif isinstance(frame, m.Plan):
            self.action = self.processor.accept(frame)
            world.enter(self, WORLD, ("build",), 0)
            self.at = At.BUILDING
        elif isinstance(frame, m.Offer):
            self.offer = frame
            self.at = At.COPYING
        else:
            self._resumed(world)

    def _built(self, world: World) -> None:
        world.leave(self, WORLD)
        plan = self._plan()
        repeats = plan.tail_from >= 0 and self.action not in (Action.COPY, Action.APPLY)
        self.ghost = plan.tail_from
        if repeats and self.ghost < self.tail_completed:
            self.at = At.REPLAY
        else:
            self._after_rebuild(world)

    def _repeat(self, world: World) -> None:
        standing = self.processor.standing
        world.enter(self, WORLD, ("tail", standing.commits, self.ghost), world.logs[self.rank][self.ghost])
        self.at = At.IN_REPLAY

    def _repeated(self, world: World) -> None:
        self._tail_result(world, self.ghost)
        self.ghost += 1
        if self.ghost < self.tail_completed:
            self.at = At.REPLAY
        else:
            self._after_rebuild(world)

    def _after_rebuild(self, world: World) -> None:
        """Back to where the recovery was noticed."""
        place, self.place = self.place, "head"
        if place == "tail":
            self.at = At.TAIL
        elif place == "barrier" and self.action is Action.APPLY:
            self._update(world)
        else:
            require(self.action is not Action.APPLY, f"rank {self.rank} is to apply an update that it has left")
            require(self.action is not Action.FINISH_TAIL, f"rank {self.rank} is to finish a tail that it has left")
            self.at = At.SETTLE

    # -- recovery: RESTORE and RESUME

    def _settle(self, world: World) -> None:
        if self._stopped(world):
            self._take_part(world)
        elif self.action is Action.COPY:
            self._begin_copy(world)
        else:
            if self.action is Action.REDO:
                self.own = self.own_start
                self.grads = ()
            self._record(world, self.processor.settle())
            self.at = At.REPORT

    def _begin_copy(self, world: World) -> None:
        plan = self._plan()
        if plan.tail_from < 0:
            self.at = At.AWAIT_OFFER
            return
        known = world.logs[self.rank] if world.standings[self.rank].commits == plan.commits else ()
        self.grads = ()  # it was cut in its update, say: those are no entries of a log
        if world.driver.ghost_resets_log:
            self.grads, known = known, ()  # the entries live in this process only, until they are written anew
        world.logs[self.rank] = known
        self.ghost = 0
        self.at = At.GHOST

    def _ghost_moves(self, world: World) -> list[str]:
        plan = self._plan()
        standing = world.standings[plan.leader]
        tail = Standing(plan.commits, Phase.APPLIED)
        if standing >= tail and self.ghost < len(world.logs[plan.leader]):
            return ["stands in"]
        return ["has no more to stand in for"] * (standing > tail)

    def _stand_in(self, world: World) -> None:
        plan, index = self._plan(), self.ghost
        if index >= len(world.logs[plan.leader]):
            self.grads = ()
            self.at = At.AWAIT_OFFER
            return
        log = world.logs[self.rank]
        if index >= len(log):
            log = (*log, self.grads[index] if index < len(self.grads) else values.NEUTRAL)
            world.logs[self.rank] = log
        if index < plan.tail_from:
            self.ghost = self.tail_completed = index + 1
            return
        world.enter(self, WORLD, ("tail", plan.commits, index), log[index])
        self.at = At.IN_GHOST

    def _stood_in(self, world: World) -> None:
        self._tail_result(world, self.ghost)
        self.ghost += 1
        self.tail_completed = self.ghost
        self.at = At.GHOST

    def _copy_state(self, world: World) -> None:
        assert self.offer is not None
        source, plan = world.ranks[self.offer.source], self._plan()
        intact = str(source.model) == self.offer.digest
        require(intact, f"source {source.rank} changed before its copy was acknowledged")
        self.model = source.model
        states = [own for commits, own in world.published[self.rank] if commits == plan.commits]
        require(bool(states), f"rank {self.rank} had published nothing from which update {plan.commits} starts")
        self.own = self.own_start = states[-1]
        self._record(world, self.processor.settle())
        self.at = At.REPORT

    def _report(self, world: World) -> None:
        plan = self._plan()
        targets = self.processor.sources_for
        right = world.chains.model[world.shard[self.rank]][plan.commits]
        require(not targets or self.model == right, f"rank {self.rank} offers a wrong state")
        offers = [m.Offer(plan.generation, self.rank, to, self.incarnation, b"", str(self.model)) for to in targets]
        world.send(self, *offers, m.Done(plan.generation, redone=self.action is Action.REDO, step=0))
        self.at = At.AWAIT_RESUME

    def _resumed(self, world: World) -> None:
        self.action = self.offer = None
        world.resumed_generation = max(world.resumed_generation, self.processor.generation)
        self.at = At.HEAD if self.processor.standing.phase is Phase.APPLIED else At.BEGIN


def _generation_of(frame: m.FromAgent) -> int:
    return getattr(frame, "generation", -1)
