"""HCCE: a collective failed although every process lives. All rebuild their groups, and run the step again.

What fails again and again costs the process whose device says so, if one does.
"""

from __future__ import annotations

from resilient_train.protocol.commands import Command
from resilient_train.protocol.job import Job, Stage
from resilient_train.strategies.base import Fault, Kind

NAME = "HCCE"
KINDS = frozenset((Kind.COLLECTIVE, Kind.LATE))


def refuses(fault: Fault, job: Job) -> str:
    """Where that is switched off, or has not helped."""
    if fault.kind is Kind.LATE:
        return fault.reason if fault.again else ""
    if not job.policy.rebuild and job.stage is Stage.RUNNING:
        off = "rebuilding process groups is switched off (MS_ENABLE_TFT has no HCCE:1)"
        return f"a collective failed ({fault.detail}), and {off}"
    replaceable = fault.rank >= 0 and not job.holders.last({fault.rank})
    return f"collectives keep failing: {fault.detail}" if fault.again and not replaceable else ""


def begin(fault: Fault, job: Job) -> list[Command]:
    """Nobody is lost."""
    if fault.again:
        return job.kill({fault.rank}, fault.detail)
    told = fault.detail if fault.kind is Kind.LATE else f"a collective failed: {fault.detail}"
    return job.begin((), told, by=NAME)
