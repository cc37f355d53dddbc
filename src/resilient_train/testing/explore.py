"""All interleavings of a small world: every reachable state is checked, and from each the job must be able to end.

Two states are the same when the same can happen in them, so the exploration ends. It is breadth first: a counterexample
is a shortest one.

Four ranks have too many. Of such a world those are explored that differ little from one schedule
(delay-bounded scheduling: Emmi, Qadeer and Rakamaric, POPL 2011): each actor goes on until it waits, and then the next
one does. At most ``delays`` times the one whose turn it is goes behind all others. Faults may come anywhere.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import NamedTuple

from resilient_train.testing import checks
from resilient_train.testing.checks import ViolationError
from resilient_train.testing.cluster import DrivenParts, Faults, Layout, Move, World
from resilient_train.testing.rank import ProgramAt


class Explored(NamedTuple):
    """What an exploration saw. ``complete`` is False where ``limit`` ended it."""

    states: int
    transitions: int
    finals: int
    complete: bool


class Counterexample(ViolationError):  # noqa: N818 - it says what it is
    """A violation with a shortest way to it."""

    def __init__(self, text: str, path: list[Move]) -> None:
        super().__init__(f"{text}\nafter {len(path)} transitions:\n" + "\n".join(f"  {move}" for move in path))
        self.path = path


def explore(
    layout: Layout,
    faults: Faults,
    driver: DrivenParts | None = None,
    *,
    limit: int = 10_000_000,
    delays: int | None = None,
) -> Explored:
    """Explores every interleaving, from the first step on; or those with at most so many ``delays``. Raises
    Counterexample.

    A state that is not final must have a transition other than a fault (no deadlock), and from every state a final one
    must be reachable (no part of the state space that is never left).
    """
    search = _Search(layout, faults, driver or DrivenParts(two_witnesses=False), limit, delays)
    collecting = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and looking through a million live objects takes half the time
    try:
        search.run()
        if search.complete:
            search.check_ends()
    finally:
        if collecting:
            gc.enable()
    return Explored(len(search.parents), search.transitions, len(search.finals), search.complete)


def started(world: World) -> World:
    """The world after a start without faults: every rank is about to begin its first step."""
    while any(rank.at < ProgramAt.BODY for rank in world.ranks):
        moves = world.moves()
        world.step(next(m for m in moves if m.actor == "agent" or world.ranks[m.about].at < ProgramAt.BODY))
    return world


Actor = tuple[str, int]
Turns = tuple[Actor, ...]
"""Who was put behind all others, one after the other."""


def _in_turn(moves: list[Move], turns: Turns) -> list[list[Move]]:
    """The moves by actor, in the order in which they have their turn."""
    actors: dict[Actor, list[Move]] = {}
    for move in moves:
        actors.setdefault((move.actor, move.about), []).append(move)
    put_back = {actor: place for place, actor in enumerate(turns)}
    return [actors[actor] for actor in sorted(actors, key=lambda actor: put_back.get(actor, -1))]


class _Search:
    def __init__(self, layout: Layout, faults: Faults, driver: DrivenParts, limit: int, delays: int | None) -> None:
        self._limit, self._delays = limit, delays
        self._root = started(World(layout, driver=driver))
        self._root.budget = faults
        self.parents: dict[int, tuple[int, Move] | None] = {_key(self._root, ()): None}
        self.before: dict[int, list[int]] = {}
        self.finals: list[int] = []
        self.transitions = 0
        self.complete = False

    def run(self) -> None:
        queue = deque([(_key(self._root, ()), self._root, Turns())])
        while queue and len(self.parents) < self._limit:
            queue.extend(self._expand(*queue.popleft()))
        self.complete = not queue

    def _expand(self, key: int, world: World, turns: Turns) -> list[tuple[int, World, Turns]]:
        moves = world.moves()
        if world.final:
            checks.check_final(world)
            self.finals.append(key)
        elif not moves:
            raise Counterexample("deadlock: nothing can happen, and the job is not over", self._path(key))
        found = []
        for move, after in (*self._scheduled(moves, turns), *((fault, turns) for fault in world.faults())):
            new = world.copy()
            try:
                new.step(move)
            except ViolationError as error:
                raise Counterexample(str(error), [*self._path(key), move]) from error
            self.transitions += 1
            following = _key(new, after)
            if move.actor != "fault":
                self.before.setdefault(following, []).append(key)
            if following not in self.parents:
                self.parents[following] = (key, move)
                found.append((following, new, after))
        return found

    def _scheduled(self, moves: list[Move], turns: Turns) -> list[tuple[Move, Turns]]:
        """What may happen next, and who has been put back for it."""
        if self._delays is None:
            return [(move, turns) for move in moves]
        left, found = self._delays - len(turns), list[tuple[Move, Turns]]()
        for each in _in_turn(moves, turns)[: left + 1]:
            found += [(move, turns) for move in each]
            turns += ((each[0].actor, each[0].about),)
        return found

    def check_ends(self) -> None:
        """Walks back from the final states, without the help of faults: every state must be met."""
        ended = set(self.finals)
        queue = list(ended)
        while queue:
            for key in self.before.get(queue.pop(), ()):
                if key not in ended:
                    ended.add(key)
                    queue.append(key)
        for key in self.parents:
            if key not in ended:
                raise Counterexample("livelock: the job can never end from here", self._path(key))

    def _path(self, key: int) -> list[Move]:
        path = []
        step = self.parents[key]
        while step is not None:
            path.append(step[1])
            step = self.parents[step[0]]
        return path[::-1]


def _key(world: World, turns: Turns) -> int:
    return hash((world.key(), turns)) if turns else world.key()
