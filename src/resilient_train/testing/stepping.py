"""The healthy half of a simulated rank: from its start through the phases of each update, as in ``session/runtime``."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Self

from resilient_train.protocol import messages as m
from resilient_train.protocol.processor import Action, Processor
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.testing import values
from resilient_train.testing.checks import require

if TYPE_CHECKING:
    from resilient_train.testing.cluster import World

WORLD = -1
"""The group of all ranks."""


class At(enum.IntEnum):
    """Where a rank is. Each has a method of the same name in lower case that lists the ways on."""

    BOOT = 0
    WAIT_START = 1
    HEAD = 2  # the tail is over
    BEGIN = 3  # head of the loop, COMPUTE is recorded
    COMPUTE = 4
    REDUCE = 5  # in the reduction of gradients
    REDUCED = 6
    PUBLISHED = 7
    BARRIER = 8
    UPDATING = 9
    TAIL = 10
    IN_TAIL = 11  # in a collective of the tail
    FINISHING = 12
    WAIT_STOP = 13  # a collective failed, or the update was cut
    AWAIT_PLAN = 14
    BUILDING = 15
    REPLAY = 16
    IN_REPLAY = 17
    SETTLE = 18
    GHOST = 19
    IN_GHOST = 20
    AWAIT_OFFER = 21
    COPYING = 22
    REPORT = 23
    AWAIT_RESUME = 24
    LEFT = 25
    DEAD = 26


class Stepping:
    """The process of one rank as long as no fault is seen; ``rank.SimRank`` adds the recoveries."""

    __slots__ = (
        "_key", "action", "alive", "at", "base", "calls", "connected", "ghost", "grads", "incarnation", "joining",
        "model", "offer", "own", "own_start", "place", "processor", "rank", "tail_completed", "tail_index",
    )  # fmt: skip

    def __init__(self, rank: int, incarnation: int, *, joining: bool, driver: type[Processor]) -> None:
        self.rank, self.incarnation, self.joining = rank, incarnation, joining
        self.processor = driver(rank, generation=-1 if joining else 0, holds=not joining)
        self.at = At.BOOT
        self.alive, self.connected = True, False
        self.model = values.TORN
        self.base = 0
        self.own = self.own_start = 0
        self.grads: tuple[int, ...] = ()
        self.calls: dict[int, int] = {}
        self.tail_index = self.tail_completed = 0
        self.place = "head"
        self.action: Action | None = None
        self.ghost = 0
        self.offer: m.Offer | None = None
        self._key: int | None = None

    def copy(self) -> Self:
        """An independent rank in the same state."""
        new = object.__new__(type(self))
        for name in Stepping.__slots__:
            setattr(new, name, getattr(self, name))
        new._key = None
        processor = object.__new__(type(self.processor))
        processor.__dict__.update(self.processor.__dict__)
        new.processor = processor
        return new

    def key(self) -> int:
        """The state as a number."""
        if self._key is None:
            p = self.processor
            self._key = hash((
                self.at, self.alive, self.incarnation, self.connected, self.model, self.own, self.own_start, self.grads,
                tuple(self.calls.items()), self.tail_index, self.tail_completed, self.place, self.action, self.ghost,
                self.offer.source if self.offer else -1, p.generation, p.standing, p.holds, p.tail_done, p.plan is None,
            ))  # fmt: skip
        return self._key

    def prepare(self, world: World) -> None:
        """A first process starts with the initial state; a replacement has none that counts."""
        if not self.joining:
            self.model = values.first_model(world.shard[self.rank])
        self.own = self.own_start = values.first_own(self.rank) if not self.joining else 0
        self.calls = dict.fromkeys((WORLD, world.shard[self.rank]), 0)

    def die(self) -> None:
        """What this process alone knew is gone."""
        self.alive = self.connected = False
        self.at = At.DEAD
        self.action = self.offer = None
        self.model = self.own = self.own_start = self.base = 0
        self.grads, self.calls = (), {}

    def fail(self, world: World) -> None:
        """The update was cut, or a collective failed: ask why, and wait."""
        self.place = "tail" if self.at is At.IN_TAIL else "head"
        self.at = At.WAIT_STOP
        if not self._stopped(world):
            world.send(self, m.Trouble(self.processor.generation, "failed"))

    def lose_data(self, world: World) -> None:
        """Memory of this rank's is damaged: say so, and wait for the recovery."""
        self.model = values.TORN
        self.processor.damage()
        self.place = "head"
        self.at = At.WAIT_STOP
        if not self._stopped(world):
            world.send(self, m.Damaged(self.processor.generation, "lost data"))

    def _stopped(self, world: World) -> bool:
        return world.stop_generation > self.processor.generation

    def _plan(self) -> m.Plan:
        assert self.processor.plan is not None
        return self.processor.plan

    def _take_part(self, world: World) -> None:
        raise NotImplementedError

    # -- a healthy step

    def _connect(self, world: World) -> None:
        self.connected = True
        world.greet(self)
        if self.joining:
            self._take_part(world)
            return
        world.publish(self.rank, 0, self.own)
        self._record(world, self.processor.standing)
        world.send(self, m.Started(str(self.model), ("world",), world.layout.replicas))
        self.at = At.WAIT_START

    def _record(self, world: World, standing: Standing) -> None:
        world.standings[self.rank] = standing

    def _head(self, world: World) -> None:
        self._record(world, self.processor.advance(Phase.COMPUTE))
        self.at = At.SETTLE if self.action is not None else At.BEGIN

    def _begin(self, world: World) -> None:
        commits = self.processor.standing.commits
        require(self.own == world.chains.own[self.rank][commits], f"rank {self.rank} starts {commits} elsewhere")
        if commits == len(world.layout.tails):
            world.send(self, m.Finish(self.processor.generation))
            self.at = At.FINISHING
            return
        world.publish(self.rank, commits, self.own)
        self.own_start = self.own
        self.at = At.COMPUTE

    def _reduce(self, world: World) -> None:
        shard = world.shard[self.rank]
        world.enter(self, shard, ("grad", self.processor.standing.commits), values.gradient(self.rank, self.own))
        self.own = values.drawn(self.own)
        self.at = At.REDUCE

    def _reduced(self, world: World) -> None:
        self.grads = tuple(value for _, value in world.leave(self, world.shard[self.rank]))
        self.at = At.REDUCED

    def _publish(self, world: World) -> None:
        world.publish(self.rank, self.processor.standing.commits + 1, self.own)
        self.at = At.PUBLISHED

    def _arrive(self, world: World) -> None:
        self._record(world, self.processor.advance(Phase.READY))
        self.at = At.BARRIER

    def _update(self, world: World) -> None:
        self._record(world, self.processor.advance(Phase.UPDATING))
        self.base, self.model = self.model, values.TORN
        self.at = At.UPDATING

    def _apply(self, world: World) -> None:
        self.model, self.base = values.updated(self.base, self.grads), 0
        self.grads = ()
        standing = self.processor.advance(Phase.APPLIED)
        world.logs[self.rank] = ()
        self._record(world, standing)
        world.high_water = max(world.high_water, standing.commits)
        self.own_start = self.own
        self.tail_index = self.tail_completed = 0
        self._next_of_tail(world)

    # -- the tail

    def _next_of_tail(self, world: World) -> None:
        length = world.layout.tails[self.processor.standing.commits - 1]
        self.at = At.TAIL if self.tail_index < length else At.HEAD

    def _call(self, world: World) -> None:
        commits, index = self.processor.standing.commits, self.tail_index
        if len(world.logs[self.rank]) == index:
            world.logs[self.rank] = (*world.logs[self.rank], values.logged(self.rank, commits, index))
        world.enter(self, WORLD, ("tail", commits, index), world.logs[self.rank][index])
        self.at = At.IN_TAIL

    def _called(self, world: World) -> None:
        self._tail_result(world, self.tail_index)
        self.tail_index += 1
        self.tail_completed = self.tail_index
        self._next_of_tail(world)

    def _tail_result(self, world: World, index: int) -> None:
        assert self.processor.plan is not None or self.at is At.IN_TAIL
        commits = self.processor.standing.commits if self.at is not At.IN_GHOST else self._plan().commits
        result = sum([value for _, value in world.leave(self, WORLD)])
        known = world.tail_results.get((commits, index), result)
        require(known == result, f"collective {index} after update {commits} gave rank {self.rank} another result")
        world.tail_results = {**world.tail_results, (commits, index): result}
