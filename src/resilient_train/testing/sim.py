"""A whole cluster in one thread with virtual time: the production controller and rank machines under random schedules.

``simulate(seed)`` draws a job, a schedule and faults from the seed and runs the job to its end, checking every state. A
failure is repeated, transition by transition, with ``python -m resilient_train.testing.sim --seed N --trace``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from resilient_train.protocol.job import Stage
from resilient_train.testing import checks
from resilient_train.testing.checks import ViolationError
from resilient_train.testing.cluster import DrivenParts, Faults, Layout, Move, World
from resilient_train.testing.rank import MISUSES, Program

MAX_TRANSITIONS = 20_000
"""More than any job of ``draw_layout`` needs; a job that is still running then is not coming to its end."""

LAYOUTS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((0, 1),),
    ((0, 1, 2),),
    ((0, 1, 2, 3),),
    ((0, 2), (1, 3)),
    ((0, 1), (2, 3)),
    ((0, 2, 4), (1, 3, 5)),
)


PROGRAMS = (
    *[Program()] * 6,
    Program(accumulate=2),
    Program(optimizers=2),
    Program(undo=True),
    Program(accumulate=2, undo=True),
    Program(optimizers=2, undo=True),
    Program(breaks=True),
    Program(optimizers=3),
    Program(accumulate=2, optimizers=2),
    Program(optimizers=2, partial=True),
    Program(optimizers=2, partial=True, swallows=True),
)


class Outcome(NamedTuple):
    """How a simulated job went. ``given_up``: every holder of a shard was lost, so the job ended. ``attempts``: how
    often all ranks started again.
    """

    transitions: int
    generations: int
    given_up: bool
    attempts: int


_IN_THE_UPDATE = ("steps twice", "enters twice in the update", "fails in the update", "leaves in the update")
"""Misuses between two optimizers."""


class SimulationError(ViolationError):
    """A violation, with the command that repeats it."""


def draw_layout(rng: random.Random) -> Layout:
    """A job: who holds what, how many updates, which collectives after each, what kind of loop."""
    groups = rng.choice(LAYOUTS)
    size = sum(map(len, groups))
    program = rng.choice(PROGRAMS)
    if rng.random() < 0.1:
        kind = rng.choice((*MISUSES,))
        program = Program(optimizers=2 if kind in _IN_THE_UPDATE else 1, misuse=kind)
    updates = rng.randint(1, 5)
    tails = tuple(_draw_tail(rng, size) for _ in range(updates))
    layout = Layout(size, tails, groups if len(groups) > 1 else (), program)
    return layout._replace(
        begun=rng.choice((*[0] * 9, updates // 2)), pulls=rng.random() < 0.2, replaces=rng.random() < 0.9
    )


def _draw_tail(rng: random.Random, size: int) -> int | tuple[tuple[int, ...], ...]:
    count = rng.choice((0, 0, 1, 2, 3))
    if rng.random() < 0.7:
        return count
    return tuple(tuple(sorted(rng.sample(range(size), rng.randint(1, size)))) for _ in range(count))


def draw_faults(rng: random.Random) -> Faults:
    """How many faults may hit the job."""
    return Faults(
        kills=rng.randint(1, 5),
        cuts=rng.choice((0, 0, 1)),
        glitches=rng.choice((0, 0, 1, 2)),
        damages=rng.choice((0, 0, 1, 2)),
        heard=rng.choice((0, 0, 0, 1)),
        fences=rng.choice((0, 0, 0, 1)),
        hangs=rng.choice((0, 0, 1, 2)),
        failures=rng.choice((0, 0, 1)),
        asked=rng.choice((0, 0, 0, 0, 1)),
    )


def draw_pauses(seed: int) -> Faults:
    """How often somebody wants the job to stand still: by numbers of its own, so that other jobs' schedules stay."""
    rng = random.Random(~seed)
    return Faults(pauses=rng.choice((0, 0, 1, 2)), withdrawn=rng.choice((0, 0, 1)))


ANOMALOUS = 8
"""Of so many seeds one has anomalies. The schedules of the others, which ``mutants.txt`` names, are what they were."""


def with_anomalies(seed: int, layout: Layout, faults: Faults) -> tuple[Layout, Faults]:
    """The job of ``seed``, with anomalies if it has some."""
    turn, left = divmod(seed, ANOMALOUS)
    if left != ANOMALOUS - 1:
        return layout, faults
    program = layout.program._replace(skips=turn % 2 == 1)
    return layout._replace(program=program), faults._replace(anomalies=1 + turn % 3)


FAILING = 32
"""In one of so many seeds the script fails by itself, on some ranks or all."""


def with_errors(seed: int, layout: Layout, faults: Faults) -> Faults:
    """The faults of ``seed``, with the script's own errors if it has some: those schedules are others than before."""
    turn, left = divmod(seed, FAILING)
    return faults._replace(errors=1 + turn % layout.world_size) if left == FAILING - 3 else faults


TWICE = 16
"""In one of so many seeds some updates are computed twice, and not always with the same result."""
ASKING = 64
"""In one of so many seeds the script asks for a step once more."""


def with_verification(seed: int, layout: Layout, faults: Faults) -> tuple[Layout, Faults]:
    """The job of ``seed``, with updates that are computed twice if it has some."""
    turn, left = divmod(seed, TWICE)
    if left != 4:
        return layout, faults
    return layout._replace(twice=1 + turn // 3 % 3, neighbours=turn // 9 % 2 == 1), faults._replace(deviations=turn % 3)


def with_asking(seed: int, faults: Faults) -> Faults:
    """The faults of ``seed``, with steps that the script asks for once more if it does so."""
    turn, left = divmod(seed, ASKING)
    return faults._replace(asks=1 + turn % 2) if left == 11 else faults


class _Scheduler:
    """Picks the next transition.

    Actors have weights that change now and then: some are much slower than others, and messages stay long under way.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._weights: dict[tuple[str, int, int], float] = {}
        self._fault_chance = rng.choice((0.003, 0.01, 0.03, 0.1))

    def pick(self, world: World) -> Move | None:
        rng = self._rng
        moves, faults = world.moves(), world.faults()
        # Most mistakes are made where a recovery is hit by the next fault.
        stage = world.controller.job.stage
        chance = self._fault_chance * (4 if stage in (Stage.RECOVERING, Stage.PAUSED) else 1)
        if stage is Stage.STARTING:
            chance = self._fault_chance / 4
        if faults and rng.random() < chance:
            return rng.choice(faults)
        if not moves:
            return None
        if rng.random() < 0.02:
            self._weights.clear()
        weights = [self._weight((move.actor, move.about, move.incarnation)) for move in moves]
        return rng.choices(moves, weights)[0]

    def _weight(self, actor: tuple[str, int, int]) -> float:
        if actor not in self._weights:
            self._weights[actor] = self._rng.choice((1.0, 1.0, 0.3, 0.003))
        return self._weights[actor]


def with_saving(seed: int, layout: Layout, faults: Faults) -> tuple[Layout, Faults]:
    """The job of ``seed``, as one whose state is saved now and then: it survives what no rank does."""
    rng = random.Random(f"saves {seed}")
    lates, differences = rng.choice((0, 0, 1, 2)), rng.choice((0, 0, 0, 1, 2))
    faults = faults._replace(kills=faults.kills + rng.randint(0, 4), lates=lates, differences=differences)
    return layout._replace(saves=True), faults


def simulate(
    seed: int,
    *,
    saves: bool = False,
    driver: DrivenParts | None = None,
    layout: Layout | None = None,
    faults: Faults | None = None,
    trace: Callable[[str], None] | None = None,
) -> Outcome:
    """Runs the job that ``seed`` stands for to its end. Raises SimulationError. ``saves``: see ``with_saving``."""
    rng = random.Random(seed)
    drawn, drawn_faults, pauses = draw_layout(rng), draw_faults(rng), draw_pauses(seed)
    drawn_faults = drawn_faults._replace(pauses=pauses.pauses, withdrawn=pauses.withdrawn)
    drawn, drawn_faults = with_anomalies(seed, drawn, drawn_faults)
    drawn_faults = with_errors(seed, drawn, drawn_faults)
    drawn, drawn_faults = with_verification(seed, drawn, drawn_faults)
    drawn_faults = with_asking(seed, drawn_faults)
    if saves:
        drawn, drawn_faults = with_saving(seed, drawn, drawn_faults)
    world = World(layout or drawn, faults or drawn_faults, driver)
    scheduler = _Scheduler(rng)
    if trace is not None:
        trace(f"{world.layout} {world.budget}")
    count = 0
    try:
        while not world.final:
            move = scheduler.pick(world)
            checks.require(move is not None, "deadlock: nothing can happen, and the job is not over")
            checks.require(count < MAX_TRANSITIONS, f"the job is not over after {count} transitions")
            assert move is not None
            if trace is not None:
                trace(f"{count:6} generation {world.controller.job.generation} {_place(world, move)} {move}")
            world.step(move)
            count += 1
        checks.check_final(world)
    except ViolationError as error:
        again = f"python -m resilient_train.testing.sim --seed {seed} --trace{' --saves' * saves}"
        raise SimulationError(f"seed {seed}, transition {count}: {error}\nrepeat it with: {again}") from error
    job = world.controller.job
    return Outcome(count, job.generation, world.ended is not None, job.attempt)


def _place(world: World, move: Move) -> str:
    if move.actor != "rank":
        return ""
    rank = world.ranks[move.about]
    return f"{rank.at.name} {type(rank.machine.state).__name__} at {tuple(rank.machine.standing)}"


def main(argv: Sequence[str] | None = None) -> int:
    """``--seed N`` runs one job, ``--seeds A B`` a range of them, as many as fit in ``--seconds``."""
    parser = argparse.ArgumentParser(prog="python -m resilient_train.testing.sim", description=main.__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), default=(0, 1_000_000))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--saves", action="store_true", help="jobs whose state is saved now and then")
    parser.add_argument("--trace", action="store_true", help="print every transition of --seed")
    options = parser.parse_args(argv)
    if options.seed is not None:
        try:
            print(simulate(options.seed, saves=options.saves, trace=print if options.trace else None))
        except SimulationError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    return _run_many(range(*options.seeds), options.seconds, saves=options.saves)


def _run_many(seeds: range, seconds: float, *, saves: bool) -> int:
    deadline = time.monotonic() + seconds
    done = transitions = 0
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        try:
            transitions += simulate(seed, saves=saves).transitions
        except SimulationError as error:
            print(error, file=sys.stderr)
            return 1
        done += 1
    print(f"{done} jobs, {transitions} transitions: no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
