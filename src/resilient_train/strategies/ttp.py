"""TTP: the job has to end, and its state is saved before.

Somebody asks for it (a signal): all come to the head of the same window once more, and each saves its share. Or nothing
brings the job back: whoever lives saves what it has, without the others. Nothing is saved before the first update.
"""

from __future__ import annotations

from resilient_train.protocol.commands import Command, Note, Send
from resilient_train.protocol.job import Job, Stage
from resilient_train.protocol.savers import Leaving, choose, why_none
from resilient_train.strategies.base import Fault, Kind

NAME = "TTP"
KINDS = frozenset((Kind.COLLECTIVE, Kind.LATE, Kind.MEMORY, Kind.LOST, Kind.OWN, Kind.TAIL))
_RUNS = (Stage.RUNNING, Stage.RECOVERING, Stage.PAUSED)


def refuses(fault: Fault, job: Job) -> str:
    """Where there is nothing to save, or nobody who has all of it."""
    trained = job.stage in _RUNS and job.retries.furthest > 0
    saves = trained and not job.holders.gone() and job.policy.save_last
    return "" if saves else fault.reason


def begin(fault: Fault, job: Job) -> list[Command]:
    """The survivors save."""
    first = job.leaving  # asked to leave, and then something went wrong: the answer stays what was asked for
    code, reason = (first.code, first.reason) if first else (fault.code, fault.reason)
    job.leaving = Leaving(code, reason, alone=True)
    job.leaving.gone = set(job.holders.absent)
    lost = (fault.rank,) if fault.rank in job.holders.absent else ()
    return _survive(job, lost, fault.reason, culprit=fault.rank)


def leave(job: Job, code: int, reason: str) -> list[Command]:
    """Somebody wants the job to end and its state to be saved. Asked twice: to end at once."""
    if job.stage not in _RUNS or job.leaving or not job.policy.save_last:
        return job.end(code, reason)
    job.leaving = Leaving(code, reason, alone=False)
    return job.begin((), reason, by=NAME, kind="leaving")


def hurry(job: Job) -> list[Command]:
    """Half of the time is gone that a job has which was asked to end: its state is saved without the ranks that have
    not come, if the others have all of it.
    """
    leaving = job.leaving
    if leaving is None or leaving.alone or job.stage is not Stage.RECOVERING or job.plan is not None:
        return []
    missing = set(range(job.world_size)) - set(job.joined)
    if not missing or choose(job.joined, job.replicas.groups) is None:
        return []
    job.leaving = Leaving(leaving.code, leaving.reason, alone=True)
    job.leaving.gone = missing
    named = ", ".join(map(str, sorted(missing)))
    return _survive(job, (), f"{leaving.reason}, and rank {named} has not come in half of the time that there is")


def _survive(job: Job, lost: tuple[int, ...], reason: str, *, culprit: int = -1) -> list[Command]:
    commands = job.begin(lost, reason, by=NAME, kind="leaving", culprit=culprit)
    job.stage = Stage.LEAVING
    return commands


def lose(job: Job, rank: int) -> list[Command]:
    """One more is lost while the survivors save: without it, if that is still possible."""
    if job.leaving is None or rank in job.leaving.gone:
        return []
    job.leaving.gone.add(rank)
    job.holders.lost(rank)
    uncovered = [group for group in job.replicas.groups if job.leaving.gone.issuperset(group)]
    if uncovered:
        told = f"{job.leaving.reason}; then rank {rank} was lost, and {why_none({}, uncovered)}"
        return job.end(job.leaving.code, told)
    if job.leaving.choice is None:
        job.joined.pop(rank, None)
        return order(job)
    job.leaving.choice = None
    return _survive(job, (rank,), f"rank {rank} was lost while the state was being saved")


def order(job: Job) -> list[Command]:
    """When all survivors have joined: who saves what. Nobody, if no whole state is left."""
    leaving = job.leaving
    if leaving is None or len(job.joined) + len(leaving.gone) < job.world_size:
        return []
    choice = choose(job.joined, job.replicas.groups)
    if choice is None:
        return job.end(leaving.code, f"{leaving.reason}; {why_none(job.joined, job.replicas.groups)}")
    orders = leaving.orders(job.generation, choice, job.world_size)
    detail: dict[str, object] = {"commits": choice.commits, "savers": choice.savers, "exact": choice.exact}
    return [Note("save_last", detail=detail), *(Send(rank, order) for rank, order in orders.items())]


def savers(job: Job, generation: int) -> tuple[tuple[int, ...], ...]:
    """Who writes the end-of-life checkpoint of ``generation``, by replica group; () if nobody does, or others."""
    if job.leaving is None or generation != job.generation or job.stage is Stage.ENDED:
        return ()
    if job.leaving.alone:
        return job.leaving.choice.savers if job.leaving.choice else ()
    return job.replicas.groups


def saved(job: Job, outcome: str) -> list[Command]:
    """The end-of-life checkpoint is there, or it failed; ``outcome`` tells people."""
    return job.end(job.leaving.code, f"{job.leaving.reason}; {outcome}") if job.leaving else []
