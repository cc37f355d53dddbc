"""All interleavings of a small world: every reachable state is checked, and from each the job must be able to end.

Two states are the same when the same can happen in them, so the exploration ends. It is breadth first: a counterexample
is a shortest one.
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


def explore(layout: Layout, faults: Faults, driver: DrivenParts | None = None, *, limit: int = 10_000_000) -> Explored:
    """Explores every interleaving, from the first step on. Raises Counterexample.

    A state that is not final must have a transition other than a fault (no deadlock), and from every state a final one
    must be reachable (no part of the state space that is never left).
    """
    search = _Search(layout, faults, driver or DrivenParts(two_witnesses=False), limit)
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


class _Search:
    def __init__(self, layout: Layout, faults: Faults, driver: DrivenParts, limit: int) -> None:
        self._limit = limit
        self._root = started(World(layout, driver=driver))
        self._root.budget = faults
        self.parents: dict[int, tuple[int, Move] | None] = {self._root.key(): None}
        self.before: dict[int, list[int]] = {}
        self.finals: list[int] = []
        self.transitions = 0
        self.complete = False

    def run(self) -> None:
        queue = deque([(self._root.key(), self._root)])
        while queue and len(self.parents) < self._limit:
            key, world = queue.popleft()
            for following, new in self._expand(key, world):
                queue.append((following, new))
        self.complete = not queue

    def _expand(self, key: int, world: World) -> list[tuple[int, World]]:
        moves = world.moves()
        if world.final:
            checks.check_final(world)
            self.finals.append(key)
        elif not moves:
            raise Counterexample("deadlock: nothing can happen, and the job is not over", self._path(key))
        found = []
        for move in (*moves, *world.faults()):
            new = world.copy()
            try:
                new.step(move)
            except ViolationError as error:
                raise Counterexample(str(error), [*self._path(key), move]) from error
            self.transitions += 1
            following = new.key()
            if move.actor != "fault":
                self.before.setdefault(following, []).append(key)
            if following not in self.parents:
                self.parents[following] = (key, move)
                found.append((following, new))
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
