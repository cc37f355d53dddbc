"""TRE: the gradient norm or the loss of a step can't be right, or the script asks for it once more. All run the step
again, its update not being applied.

Once for each step: what comes again is no mistake of the machine's, so it is written down, and the job goes on.

Every so many steps one is run again although nothing looks wrong (``RESILIENT_VERIFY_EVERY``): a rank that comes to
other bits the second time computes otherwise than it did, and its process is given up. The third run counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resilient_train.protocol.commands import Command, KeepAnomalies, Note
from resilient_train.protocol.job import Job
from resilient_train.protocol.messages import Anomaly, Computed, Late
from resilient_train.protocol.neighbours import Judgement, Round
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
    values = (*job.anomalies.get(key, ()), message.value)
    job.know_anomalies({key: values})
    return [] if message.what == "raised" else [KeepAnomalies(message.what, message.step, values)]


def compute_again(message: Computed, job: Job, *, distance: int = 0, rounds: Sequence[Round] = ()) -> list[Command]:
    """All have computed it, and nobody has applied it. ``distance``: now from the inputs of a replica. ``rounds``: what
    has come of that before.
    """
    commands = job.begin((), f"step {message.step} is computed again, to verify it", by=NAME, kind="verifying")
    job.verified, job.verifying, job.distance, job.rounds = message.commits, True, distance, tuple(rounds)
    return commands


class Deviants(NamedTuple):
    """The ranks that were the first to come to something else than before: from them the others may have it.

    Not ``located``: ranks that make different calls (stages of a pipeline) have no places that can be compared, and it
    began on one of these.
    """

    ranks: list[int]
    located: bool


def deviants(told: Mapping[int, Computed]) -> Deviants:
    """Among ranks that make the same calls, whose places stand beside each other: of each kind the first ones."""
    first: dict[str, int] = {}
    for each in told.values():
        if each.differs_at >= 0:
            first[each.calls] = min(each.differs_at, first.get(each.calls, each.differs_at))
    ranks = [rank for rank, each in told.items() if each.differs_at >= 0 and each.differs_at == first[each.calls]]
    return Deviants(sorted(ranks), len(first) < 2)


def first_of_each_part(told: Mapping[int, Computed], groups: Sequence[Sequence[int]]) -> dict[int, Computed]:
    """Who has come to something else than its neighbour, without those that have it from another part of the model:
    there it began earlier.
    """
    first = deviants(told).ranks
    part = {rank: group for group in groups for rank in group}
    return {
        rank: each
        for rank, each in told.items()
        if each.differs_at >= 0 and any(told[other].calls == each.calls for other in first if other in part[rank])
    }


def deviation(found: Deviants, told: Mapping[int, Computed]) -> str:
    """What is told of them."""
    first = told[found.ranks[0]]
    where = (
        "in the gradients before the update"
        if first.differs_at == first.of - 1
        else f"in what it gives to collective {first.differs_at + 1} of {first.of - 1}"
    )
    which = "" if found.located else f" (it, or one of ranks {', '.join(map(str, found.ranks[1:]))}, was the first)"
    return (
        f"computed step {first.step} twice and came to different bits, first {where}{which}: a device computes "
        "wrongly, or the script does not compute the same each time (`resilient-train drill` tells)"
    )


def evidence(ranks: Sequence[int], told: Mapping[int, Computed]) -> dict[str, object]:
    """For the event, by rank: the digests at the first place that differs, before and now; of the batch; and where."""
    known = {str(rank): told[rank] for rank in ranks if rank in told}
    return {
        "digests": {rank: list(each.digests) for rank, each in known.items()},
        "batches": {rank: each.batch for rank, each in known.items()},
        "devices": {rank: each.device for rank, each in known.items()},
    }


def beside_neighbours(found: Judgement, step: int) -> tuple[str, str]:
    """What is told of ranks that come to something else than their replicas from the same inputs, and of the job."""
    if found.unclear:
        who = f"ranks {', '.join(map(str, found.unclear))} come to different bits from the same inputs (step {step})"
        return who, (
            f"{who}: one of their devices computes wrongly, each time in the same way, or the script computes "
            "something of its own on each rank (it looks at its rank, or at data beside step.batch; then "
            "RESILIENT_VERIFY_INPUTS=neighbour is not for it)"
        )
    ranks = ", ".join(map(str, sorted(found.wrong)))
    who = f"rank {ranks} comes to other bits in step {step} than two of its replicas from the same inputs"
    return who, f"{who}, again and again: its device computes wrongly, each time in the same way: take it out of use"


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
