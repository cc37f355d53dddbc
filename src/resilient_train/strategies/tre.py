"""TRE: the gradient norm or the loss of a step can't be right, or the script asks for it once more. All run the step
again, its update not being applied.

Once for each step: what comes again is no mistake of the machine's, so it is written down, and the job goes on.

Every so many steps one is run again although nothing looks wrong (``RESILIENT_VERIFY_EVERY``): a rank that comes to
other bits the second time computes otherwise than it did, and its process is given up. The third run counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from resilient_train.protocol.commands import Command, KeepAnomalies, Note
from resilient_train.protocol.job import Job
from resilient_train.protocol.messages import Anomaly, Computed, Late
from resilient_train.strategies.base import Fault, Kind

NAME = "TRE"
KINDS = frozenset((Kind.ANOMALY,))
_NAMES = {"norm": "gradient norm", "loss": "loss"}


def refuses(fault: Fault, job: Job) -> str:  # noqa: ARG001 - a Strategy is asked so
    """Never: nobody else takes what it would refuse, and the rank waits for an answer."""
    return ""


def begin(fault: Fault, job: Job) -> list[Command]:
    """Nobody is lost. Each Resume from now on names the step (``Job.resume``), whatever comes in between."""
    return job.begin((), fault.detail, by=NAME)


def write_down(rank: int, message: Anomaly, job: Job) -> list[Command]:
    """One value for each time that the step ran: that of whoever tells it first."""
    key = message.what, message.step
    if job.anomalies_told.get(key) == (job.attempt, message.generation):
        return []
    kept = keep(message, job)
    detail: dict[str, object] = {"step": message.step, "what": message.what, "again": message.again}
    values = [] if message.what == "raised" else [*map(_in_json, job.anomalies[key])]
    detail |= {"values": values, "reason": sentence(rank, message)}
    return [*kept, Note("anomaly", rank=rank, detail=detail)]


def keep(message: Anomaly, job: Job) -> list[Command]:
    """In the job, and a value in the file, unless this run of the step has one."""
    key, now = (message.what, message.step), (job.attempt, message.generation)
    if job.anomalies_told.get(key) == now:
        return []
    job.anomalies_told[key] = now
    job.anomalies[key] = (*job.anomalies.get(key, ()), message.value)
    if message.what == "raised":
        return []
    values = {step: each for (what, step), each in sorted(job.anomalies.items()) if what == message.what}
    return [KeepAnomalies(message.what, values)]


def compute_again(message: Computed, job: Job) -> list[Command]:
    """All have computed it once, and nobody has applied it."""
    commands = job.begin((), f"step {message.step} is computed again, to verify it", by=NAME, kind="verifying")
    job.verified, job.verifying = message.commits, True
    return commands


def deviants(told: Mapping[int, Computed]) -> list[int]:
    """The ranks that were the first to come to something else than before: from them the others may have it."""
    found = {rank: each.differs_at for rank, each in told.items() if each.differs_at >= 0}
    return sorted(rank for rank, at in found.items() if at == min(found.values()))


def deviation(ranks: Sequence[int], told: Mapping[int, Computed]) -> str:
    """What is told of them."""
    first = told[ranks[0]]
    where = (
        "in the gradients before the update"
        if first.differs_at == first.of - 1
        else f"in what it gives to collective {first.differs_at + 1} of {first.of - 1}"
    )
    return (
        f"computed step {first.step} twice and came to different bits, first {where}: a device computes wrongly, or "
        "the script does not compute the same each time (`resilient-train drill` tells)"
    )


def evidence(ranks: Sequence[int], told: Mapping[int, Computed]) -> dict[str, object]:
    """For the event, by rank: the digests at the first place that differs, before and now; of the batch; and where."""
    return {
        "digests": {str(rank): list(told[rank].digests) for rank in ranks},
        "batches": {str(rank): told[rank].batch for rank in ranks},
        "devices": {str(rank): told[rank].device for rank in ranks},
    }


def _in_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _limit(message: Anomaly) -> str:
    if not math.isfinite(message.value):
        return ""
    if message.usual is None:
        return f" (threshold {message.limit:g})"
    return f" (usual before it: {message.usual:g}; from {message.limit:g} on it is a spike)"


def sentence(rank: int, message: Anomaly) -> str:
    """What is told of it, and what is done."""
    seen = _seen(rank, message)
    if message.again and message.what == "raised":
        return f"{seen}, and it has been run again already: this is the script's own error"
    if message.again:
        counts = "its update is left out" if message.skips else "the step counts"
        return f"{seen}, and the step has been run again for that: it is written down, and {counts}"
    return f"{seen}: all run the step again, {'without its update' if message.skips else 'its update was not applied'}"


def _seen(rank: int, message: Anomaly) -> str:
    if message.what == "raised":
        return f"rank {rank} asks for step {message.step} once more ({message.text})"
    return f"the {_NAMES[message.what]} of step {message.step} is {message.value:g} on rank {rank}{_limit(message)}"


def late_sentence(rank: int, message: Late) -> str:
    """What is told of something that was noticed behind the update."""
    if message.seen is not None:
        return f"{_seen(rank, message.seen)}, behind its update"
    why = f": {message.reason}" if message.reason else ""
    return f"rank {rank} says that what was trained since step {message.step} can't be right{why}"
