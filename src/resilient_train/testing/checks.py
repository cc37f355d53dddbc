"""What must hold in every state of a simulated job: the promise of the library, as code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_train.protocol.job import Stage
from resilient_train.protocol.messages import Plan
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.testing import values

if TYPE_CHECKING:
    from resilient_train.testing.cluster import World
    from resilient_train.testing.rank import SimRank


class ViolationError(AssertionError):
    """The promise was broken."""


def require(condition: bool, text: str) -> None:
    """Raises ViolationError with ``text`` unless ``condition``."""
    if not condition:
        raise ViolationError(text)


def check(world: World) -> None:
    """Checks one state of the world. Raises ViolationError."""
    living = [rank for rank in world.ranks if rank.alive]
    for rank in living:
        _check_rank(world, rank)
    if world.controller.job.stage is Stage.PAUSED and living:
        _check_pause(world, living)
    updating = [rank.machine.standing.commits for rank in living if rank.machine.standing.phase is Phase.UPDATING]
    for commits in updating:
        ready = Standing(commits, Phase.READY)
        late = [rank for rank, standing in enumerate(world.standings) if standing < ready]
        # The record of a rank may be one that it has taken over: what it says itself counts as well.
        late += [rank.rank for rank in living if rank.machine.intact and rank.machine.standing < ready]
        require(not late, f"update {commits} is being applied while ranks {late} are not READY")


def _check_pause(world: World, living: list[SimRank]) -> None:
    """While the job is paused, all stand at one head, and nobody's code runs."""
    stands = {(type(rank.machine.state).__name__, rank.machine.standing.commits) for rank in living}
    require(len(stands) == 1, f"the job is paused, and its ranks stand at {stands}")
    require(next(iter(stands))[0] in ("Target", "Meet"), f"the job is paused, and its ranks are at {stands}")
    job = world.controller.job
    require(job.pause_at is not None and job.step >= job.pause_at, f"the job is paused before {job.step}, too early")


def _check_rank(world: World, rank: SimRank) -> None:
    machine = rank.machine
    commits, phase = machine.standing
    if machine.intact and phase is not Phase.UPDATING and rank.connected and not rank.heard:
        expected = world.chains.model[world.shard[rank.rank]][commits]
        model = rank.model if rank.undo is None else rank.undo
        require(model == expected, f"rank {rank.rank} is not in the undisturbed state after {commits} updates")
    # A replacement that has not joined yet (-1) is in no generation.
    in_old = 0 <= machine.generation < world.resumed_generation
    text = f"rank {rank.rank} is in generation {machine.generation}, others train in {world.resumed_generation}"
    require(not in_old, text)


def check_plan(world: World, plan: Plan) -> None:
    """A plan may not take back an update that somebody has applied."""
    high = world.high_water
    require(plan.commits >= high, f"the plan goes back to {plan.commits}, but {high} updates were applied")
    for target, source in plan.copies.items():
        require(world.shard[target] == world.shard[source], f"rank {target} is to copy the shard of rank {source}")


def check_kill(world: World, rank: int) -> None:
    """The controller is about to have this rank killed: not with the last copy of its shard, as far as it can know."""
    victim = world.ranks[rank]
    if not (victim.alive and victim.machine.intact):
        return
    unseen = {pair[0] for pair in {*world.unseen, *world.unreaped} - world.fenced}
    others = [each for each in world.ranks if world.shard[each.rank] == world.shard[rank] and each.rank != rank]
    counted = [each for each in others if each.rank in unseen or _seems_to_hold(world, each)]
    require(bool(counted), f"rank {rank} was killed, which alone had the state of its shard")


def _seems_to_hold(world: World, rank: SimRank) -> bool:
    """It has the state, or has lost it and could not say so yet."""
    machine = rank.machine
    if machine.intact or not rank.alive:
        return rank.alive
    on_its_way = any(key[0] == rank.rank for key in world.up)
    trained = machine.generation >= 0
    return trained and (machine.generation < world.controller.job.generation or on_its_way)


def check_end(world: World) -> None:
    """The job may be given up, or end by an error of the script's, only if what it holds is saved, or some shard is in
    no living rank any more.
    """
    assert world.ended is not None
    leaving, reason = world.controller.job.leaving, world.ended.reason
    if leaving is not None and reason.endswith("; saved"):
        return
    if world.ended.reason == "stopped":
        return  # at once
    failed = bool(world.left or world.raised)
    untrained = all(standing.commits <= world.layout.begun for standing in world.standings)
    if untrained and (failed or leaving is not None or not world.layout.replaces):
        return  # nothing is saved before the first update is on record
    if leaving is not None and len(world.groups) > 1 and "from before different updates" in reason:
        return  # no two shards are of one update
    if world.ended.code == 2 and world.differed:
        return  # nothing is saved from before it, or they had differed before
    if world.ended.code == 2 and all(rank.deviated >= 0 for rank in world.ranks):
        return  # none of them computes the same twice
    if world.layout.neighbours and any(rank.deviated >= 0 for rank in world.ranks):
        return  # a device always computes otherwise than others, or nothing says whose does
    require(bool(_lost(world)), f"the job was given up although every shard has a holder: {world.ended.reason}")
    saved = world.saved and world.layout.replaces and leaving is None and not failed
    require(not saved, f"the job was given up although update {world.saved} is saved: {world.ended.reason}")


def _lost(world: World) -> set[int]:
    """The shards that no living rank has whole. A rank may have been cut without having said so yet."""
    holders = [rank for rank in world.ranks if rank.alive and rank.machine.intact]
    whole = {world.shard[rank.rank] for rank in holders if rank.machine.standing.phase is not Phase.UPDATING}
    return set(range(len(world.groups))) - whole


def check_going_back(world: World) -> None:
    """All are about to go back to what is saved: the state of some shard is in no living rank any more."""
    require(bool(_lost(world)), "all go back although every shard has a holder")


def check_final(world: World) -> None:
    """The job came to its end: everything is as in a run that was never disturbed."""
    if world.ended is not None:
        return
    total = len(world.layout.tails)
    for rank in world.ranks:
        if not rank.alive:
            continue
        commits, model = rank.machine.standing.commits, world.chains.model[world.shard[rank.rank]][total]
        require(commits == total, f"rank {rank.rank} left after {commits} updates")
        require(rank.model == model, f"rank {rank.rank} left with another model")
        own = world.chains.own[rank.rank][total]
        for _ in range(world.program.rest):
            own = values.used(values.drawn(own))
        require(rank.own == own, f"rank {rank.rank} left with another state of its own")
