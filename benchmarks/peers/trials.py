"""The trials: faults one after the other, the same steps without any, and a fault every so many seconds."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

from recovery import RESTOCK_S, STEPS_BETWEEN

from peers.recoveries import Fault, all_back, digests, measured, survivors_on
from peers.systems import System, Trial
from peers.watch import Job, running, sample

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_WARM_UP = 3 * STEPS_BETWEEN
_ON_THE_WAY_S = 6.0
"""How long one waits for the lost rank after the survivors went on without it, where it does not come back anyway."""


def faults(system: System, trial_of: Callable[[], Trial], kind: str, count: int, patience_s: float) -> dict[str, Any]:
    """``count`` faults of a kind, the n-th of all systems at the same rank; in as few jobs as the system allows."""
    moments = random.Random(count)
    found: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    while len(found) < count:
        with running(system, trial_of()) as job:
            _start(system, job)
            while len(found) < count:
                result = _one_fault(system, job, kind, len(found), moments.random(), patience_s)
                found.append(result)
                if result["all_ms"] is None or system.one_fault:
                    break
            ends.append(_end(job))
    return {"faults": found, "ends": ends}


def undisturbed(system: System, trial: Trial, seconds: float, steps: set[int]) -> dict[str, Any]:
    """The same job without a fault: how long a step takes, and the digests after these steps, as far as they come."""
    with running(system, trial) as job:
        _start(system, job)
        time.sleep(RESTOCK_S)
        job.update()
        first = len(job.slots[0].commits)
        time.sleep(seconds)
        job.update()
        commits = job.slots[0].commits[first:]
        last = max(steps, default=0)
        job.wait_for(lambda: all(last <= max(s.digests, default=-1) for s in job.slots[: job.ranks]), trial.limit_s)
        return {"step": sample(commits), "digests": {step: job.slots[0].digests.get(step) for step in sorted(steps)}}


def goodput(system: System, trial: Trial, seconds: float, every_s: float) -> dict[str, Any]:
    """How far a job comes that is hit every so often. The rest of the time nobody touches it."""
    with running(system, trial) as job:
        _start(system, job)
        begin_ns, first = time.time_ns(), _progress(job)
        end = time.monotonic() + seconds
        number = hit = 0
        due = time.monotonic() + every_s / 2
        while time.monotonic() < end:
            if job.wait_for(lambda: False, min(due, end) - time.monotonic()) or job.over():
                break
            if time.monotonic() < due:
                continue
            due += every_s
            order = [(number + more) % len(job.slots) for more in range(len(job.slots))]
            number += 1
            victim = next((slot for slot in order if job.slots[slot].alive()), None)
            if victim is not None:
                job.fault(victim, signal.SIGKILL)
                hit += 1
        job.update()
        took_s = (time.time_ns() - begin_ns) / 1e9
        return {"steps": _progress(job) - first, "seconds": seconds, "ran_s": round(took_s, 1), "faults": hit}


def _progress(job: Job) -> int:
    """The highest step that any rank has committed: what is done again counts once."""
    job.update()
    return max(slot.highest() for slot in job.slots)


def _start(system: System, job: Job) -> None:
    job.wait("train", lambda: all(slot.highest() >= _WARM_UP for slot in job.slots[: job.ranks]))
    if system.standby:
        job.wait("have a standby", lambda: job.standby_ready)


def _one_fault(system: System, job: Job, kind: str, number: int, moment: float, patience_s: float) -> dict[str, Any]:
    """Waits until there may be a fault, sends it, and waits for what comes of it, or for the end of the patience."""
    slot = number % job.ranks
    time.sleep(RESTOCK_S)
    job.update()
    last = job.slots[slot].commits[-6:]
    time.sleep(moment * (last[-1].time_ns - last[0].time_ns) / 1e9 / (len(last) - 1))
    hit_ns = job.fault(slot, SIGNALS[kind])
    job.update()
    before = [each for each in job.slots[slot].commits if each.time_ns <= hit_ns]
    fault = Fault(slot, hit_ns, before[-1].step)

    def on() -> bool:
        return survivors_on(job.slots, job.ranks, fault) is not None

    def back() -> bool:
        found = all_back(job.slots, job.ranks, fault)
        return found is not None and all_back(job.slots, job.ranks, fault, found.step + STEPS_BETWEEN) is not None

    started = time.monotonic()
    if job.wait_for(on, patience_s):
        left_s = patience_s - (time.monotonic() - started)
        job.wait_for(back, min(left_s, _ON_THE_WAY_S) if kind == "stop" or not system.rejoins else left_s)
    result = measured(job.slots, job.ranks, fault)
    # A step further than before the fault is a matter of a few steps, once all are back.
    if result["all_ms"] is not None and result["caught_up_ms"] is None:
        job.wait_for(lambda: measured(job.slots, job.ranks, fault)["caught_up_ms"] is not None, patience_s)
        result = measured(job.slots, job.ranks, fault)
    return {**result, "waited_s": round(time.monotonic() - started, 1), "job_over": job.over()}


def _end(job: Job) -> dict[str, Any]:
    """The digests at the end of a job with faults, after a step that has been done since the last of them."""
    since = max((slot.commits[-1].time_ns for slot in job.slots if slot.commits), default=0) - 2_000_000_000
    highest = max(slot.highest() for slot in job.slots)
    job.wait_for(lambda: (digests(job.slots, since) or (-1, set()))[0] >= highest, 10)
    found = digests(job.slots, since)
    return {"step": found[0], "digests": sorted(found[1])} if found else {"step": None, "digests": []}
