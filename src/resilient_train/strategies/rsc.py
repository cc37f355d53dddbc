"""RSC: state is gone or in doubt, or the job has not begun. All start again, from what was saved or from nothing."""

from __future__ import annotations

from resilient_train.protocol.commands import Command, Note, Spawn
from resilient_train.protocol.job import Job, Stage
from resilient_train.strategies.base import Fault, Kind

NAME = "RSC"
KINDS = frozenset((Kind.LOST, Kind.STATE_GONE, Kind.AT_START, Kind.DIFFERS, Kind.LATE_ANOMALY))
_WRONG = (Kind.DIFFERS, Kind.LATE_ANOMALY)
"""The state is there, and not to be gone on from. Nobody is lost, so this needs no ARF."""


def refuses(fault: Fault, job: Job) -> str:
    """Where the state is not lost, nothing was saved that was to be kept, or no more are started again."""
    if fault.kind is Kind.DIFFERS and (why_not := _doubts(fault, job)):
        return why_not
    if fault.kind is not Kind.AT_START and not _goes_back(fault, job):
        return fault.reason
    if not (job.policy.restart_on_error or job.uses_a_session()):
        none = "it has no Session, or one that is a plain loop (--max-restarts N would restart it)"
        return f"{fault.reason}, and {none}"
    spent = job.spent(fault.rank, goes_back=fault.kind in _WRONG)
    if fault.kind is Kind.LOST and spent:
        return fault.reason  # which says so
    return spent and f"{fault.reason}, and {spent}"


def _goes_back(fault: Fault, job: Job) -> bool:
    """A state is given up only where nothing else is left."""
    gone = fault.kind in (Kind.STATE_GONE, *_WRONG) or job.holders.gone()
    return gone and job.leaving is None and job.can_go_back()


def _doubts(fault: Fault, job: Job) -> str:
    """Going back cures what a machine did once. A script that makes replicas differ makes them differ again."""
    saved = job.newest_saved()
    if saved <= 0:
        return fault.reason
    if saved < job.differed_at:
        return f"{fault.reason}. They had differed before, and all had gone back for that: no machine does so twice"
    return ""


def begin(fault: Fault, job: Job) -> list[Command]:
    """Nothing of what the ranks had done counts any more."""
    if fault.kind is not Kind.AT_START:
        job.stage = Stage.STARTING
        job.plan, job.over = None, False
        job.retries.start_again()
        for memory in (job.joined, job.done, job.finished, job.left, job.exited, job.evidence, job.computed):
            memory.clear()
        job.verified = -1  # what is computed anew counts anew, so what replicas agreed on before says nothing of it
        job.neighbours_agreed = min(job.neighbours_agreed, 0)
        job.end_verifying()
    job.attempt += 1
    job.started.clear()
    job.never_started.clear()
    job.incarnations = [incarnation + 1 for incarnation in job.incarnations]
    detail = {"reason": fault.reason, "attempt": job.attempt, "state_lost": fault.kind is not Kind.AT_START}
    spawns = [Spawn(r, job.incarnations[r], joining=False, attempt=job.attempt) for r in range(job.world_size)]
    return [Note("restart_all", rank=fault.rank, detail=detail), *spawns]
