"""Recoveries as stories: ``tests/stories/*.txt`` say what happens, and then what everybody does about it.

    python tests/sim/stories.py            # writes what they do now; read the difference

A story begins with what it is about (lines with ``#``), what the job is (``Layout`` and ``Program`` in
``resilient_train/testing``) and what befalls it: ``KIND of RANK in STATE of step N``, one after the other; STATE is the
rank's, or PAUSED, which is the job's. Everybody takes turns, the agent first. What is told begins with the first fault:
what the agent notes, and of each rank the event, the effects, and the state that follows. It ends when all train again,
or with the job.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from resilient_train.protocol.commands import Command, EndJob, Kill, Note, Spawn
from resilient_train.protocol.job import Stage
from resilient_train.protocol.rank import Rank
from resilient_train.testing import checks
from resilient_train.testing.cluster import BUDGETS, DrivenParts, Faults, Layout, Move, World
from resilient_train.testing.rank import Program

FOLDER = Path(__file__).parents[1] / "stories"
TURNS = 20_000
_FAULT = re.compile(r"(?P<kind>[a-z ]+) of (?P<rank>\d+) in (?P<state>[A-Z]\w+) of step (?P<step>\d+)")


class Blow(NamedTuple):
    """One fault of a story."""

    kind: str
    rank: int
    state: str
    step: int


class Story(NamedTuple):
    """What stands above the line of a file."""

    head: str
    layout: Layout
    blows: tuple[Blow, ...]


def read(text: str) -> Story:
    """The story of a file's text, whatever was written below its line."""
    head = text.partition("\n---\n")[0].rstrip()
    job: dict[str, Any] = {}
    program: dict[str, Any] = {}
    blows: list[Blow] = []
    for line in head.splitlines():
        if not line or line.startswith("#"):
            continue
        if found := _FAULT.fullmatch(line):
            blows.append(Blow(found["kind"], int(found["rank"]), found["state"], int(found["step"])))
            continue
        name, value = line.split(": ")
        (program if name in Program._fields else job)[name] = ast.literal_eval(value)
    layout = Layout(job.pop("ranks"), job.pop("tails"), job.pop("replicas", ()), Program(**program), **job)
    return Story(head, layout, tuple(blows))


def told(story: Story) -> str:
    """The whole text of the file: the head, and what happens now."""
    return "\n".join([story.head, "---", *_Telling(story).run()]) + "\n"


class _Told(World):
    """A world that says what the agent notes and does."""

    say: Callable[[str, str], None]

    def carry_out(self, commands: Sequence[Command]) -> None:
        say = getattr(self, "say", None)
        for command in commands if say is not None else ():
            match command:
                case Note(kind=kind, detail=detail):
                    shown = ", ".join(f"{name} {value}" for name, value in detail.items() if value not in ("", [], {}))
                    say("agent", f"{kind}: {shown}" if shown else kind)
                case Spawn(rank=rank, joining=joining):
                    say("agent", f"{'a new process for' if joining else 'starts'} rank {rank}")
                case Kill(rank=rank):
                    say("agent", f"kills rank {rank}")
                case EndJob():
                    say("agent", "the job ends")
        super().carry_out(commands)


class _Telling:
    """Runs one story."""

    def __init__(self, story: Story) -> None:
        self._left = list(story.blows)
        self._lines: list[str] = []
        self._struck, self._before = False, 0
        self._turn: dict[tuple[str, int], int] = {}
        telling = self

        class Speaking(Rank):
            __slots__ = ()

            def on(self, event: Any) -> Any:
                before = type(self.state).__name__
                effects = super().on(event)
                after = type(self.state).__name__
                did = " ".join(type(effect).__name__ for effect in effects)
                moved = f"{before} -> {after}" if before != after else before
                telling.say(f"rank {self.me}", f"{moved:<18} {_described(event)}: {did}")
                return effects

        budget: dict[str, int] = {}
        for blow in story.blows:
            budget[BUDGETS[blow.kind]] = budget.get(BUDGETS[blow.kind], 0) + 1
        self._world = _Told(story.layout, Faults(**budget), DrivenParts(rank=Speaking, two_witnesses=False))
        self._world.say = self.say

    def say(self, who: str, what: str) -> None:
        if self._struck:
            self._lines.append(f"{who:<7} {what}".rstrip())

    def run(self) -> list[str]:
        world = self._world
        for _ in range(TURNS):
            if world.final:
                break
            move = self._blow() or self._next()
            assert move is not None, "nothing can happen, and the job is not over"
            world.step(move)
            if self._struck and not self._left and self._repaired():
                self._lines.append("all     train again")
                self._struck = False
        assert not self._left, f"{self._left} did not come to pass"
        checks.check_final(world)
        done = {rank.machine.standing.commits for rank in world.ranks if rank.alive}
        end = (
            world.ended.reason if world.ended is not None else f"all have made {max(done)} updates, with the right bits"
        )
        return [*self._lines, f"at last: {end}"]

    def _blow(self) -> Move | None:
        if not self._left:
            return None
        kind, rank, state, step = self._left[0]
        machine = self._world.ranks[rank].machine
        if state not in (type(machine.state).__name__, self._world.controller.job.stage) or machine.number != step:
            return None
        about = 1 << rank if kind == "hang" else rank
        for move in self._world.faults():
            if move.name == kind and move.about in (about, 0 if kind in ("asked to end", "fence") else about):
                del self._left[0]
                if not self._struck:
                    self._struck, self._before = True, self._world.controller.job.generation
                self._lines.append(f"fault   {kind} of rank {rank}")
                return move
        return None

    def _next(self) -> Move | None:
        """Whose turn is longest ago; the agent before the ranks, an interrupt before what it interrupts; a pause ends
        when nothing else can happen.
        """
        moves = self._world.moves()
        patient = [move for move in moves if move.name not in ("loses patience", "ends the pause")] or moves
        agents = [move for move in patient if move.actor == "agent"]
        found = min(agents or patient, key=self._order, default=None)
        if found is not None:
            self._turn[found.actor, found.about] = max(self._turn.values(), default=0) + 1
        return found

    def _order(self, move: Move) -> tuple[int, int, int, str]:
        quick = 0 if move.name in ("is interrupted", "is stopped", "sees the stop") else 1
        return (self._turn.get((move.actor, move.about), 0), move.about, quick, move.name)

    def _repaired(self) -> bool:
        job = self._world.controller.job
        if job.stage is not Stage.RUNNING or job.generation == self._before:
            return False
        return all(type(rank.machine.state).__name__ in ("Open", "Body", "Finish") for rank in self._world.ranks)


def _described(event: Any) -> str:
    how = getattr(event, "how", "")
    return f"{type(event).__name__}({how})" if how else type(event).__name__


def stories() -> Iterator[Path]:
    """All files, by name."""
    return iter(sorted(FOLDER.glob("*.txt")))


if __name__ == "__main__":
    for path in stories():
        try:
            path.write_text(told(read(path.read_text())))
        except AssertionError as error:
            sys.exit(f"{path.name}: {error}")
