"""UCE: memory has lost data. The rank copies what it lost from a replica, or all run the step again.

A rank that loses memory again and again is replaced.
"""

from __future__ import annotations

from resilient_train.protocol.commands import Command
from resilient_train.protocol.job import Job
from resilient_train.strategies.base import Fault, Kind

NAME = "UCE"
KINDS = frozenset((Kind.MEMORY,))


def refuses(fault: Fault, job: Job) -> str:
    """Where the process would have to go, and nobody else has its state."""
    last = fault.again and job.holders.last({fault.rank})
    return f"rank {fault.rank} keeps losing memory: {fault.detail}" if last else ""


def begin(fault: Fault, job: Job) -> list[Command]:
    """The rank says what it still has when it joins."""
    if fault.again:
        return job.kill({fault.rank}, fault.detail)
    return job.begin((), f"rank {fault.rank}: {fault.detail}", by=NAME)
