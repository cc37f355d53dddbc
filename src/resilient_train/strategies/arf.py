"""ARF: a process is gone. Another one takes its place, and copies the state from a replica; all others keep theirs."""

from __future__ import annotations

from resilient_train.protocol.commands import Command, Spawn
from resilient_train.protocol.job import NOBODY_LEFT, Job
from resilient_train.strategies.base import Fault, Kind

NAME = "ARF"
KINDS = frozenset((Kind.LOST,))


def refuses(fault: Fault, job: Job) -> str:
    """Where no more are replaced, or nobody is left to copy from."""
    told = f"rank {fault.rank} was lost ({fault.detail})"
    if spent := job.spent(fault.rank):
        return f"{told}, and {spent}"
    return f"{told}; {NOBODY_LEFT}" if job.holders.gone() else ""


def begin(fault: Fault, job: Job) -> list[Command]:
    """The fork comes last: it takes the agent longer than all the rest, and the survivors have work to do."""
    rank = fault.rank
    job.replacements += 1
    job.incarnations[rank] += 1
    spawn = Spawn(rank, job.incarnations[rank], joining=True, attempt=job.attempt)
    return [*job.begin((rank,), f"rank {rank} {fault.detail}", by=NAME), spawn]
