"""TSP: somebody wants the job to stand still. All stop before the same step, and go on when they are told to.

A pause is a Resume that is not sent. A word on the board says before which step; the first rank that comes to it says
so, and a recovery without a fault brings all others there: no rank can be further, for it would need this one. A
recovery that ends at that head, or behind it, lets nobody go either. What is wanted is in ``Job``, until it is taken
back; so a fault in a pause is repaired, and the job still stands.

No fault leads here, so it is on no rung of the ``LADDER``.
"""

from __future__ import annotations

from resilient_train.protocol.commands import Command, Note, SetPause
from resilient_train.protocol.job import Job, Stage
from resilient_train.protocol.messages import Paused

NAME = "TSP"
_STANDS_OR_RUNS = (Stage.STARTING, Stage.RUNNING, Stage.RECOVERING, Stage.PAUSED)


def refuses(job: Job, step: int) -> str:
    """Why the job is not asked to pause before ``step``; empty if it may be."""
    if not job.policy.pause:
        return "pausing is switched off (MS_ENABLE_TFT has no TSP:1)"
    if job.stage not in _STANDS_OR_RUNS or job.leaving is not None:
        return f"the job is about to end ({job.stage.value})"
    if not job.uses_a_session():
        return "it has no Session, or one that is a plain loop: it is neither repaired nor paused"
    if job.stage is Stage.PAUSED:
        return f"the job is paused already, before step {job.step}"
    if job.pause_at is not None and step >= job.pause_at:
        return f"a pause is asked for already, before {described(job.pause_at)}"
    return ""


def ask(job: Job, step: int, by: str) -> list[Command]:
    """All are to stop before ``step``; an earlier step takes the place of a later one."""
    job.pause_at = step
    return [Note("pause_asked", detail={"by": by, "at_step": step}), SetPause(step)]


def reached(job: Job) -> list[Command]:
    """A rank stands there. If the pause was taken back meanwhile, it waits all the same: the others fetch it."""
    return job.begin((), f"pausing before {described(job.pause_at or 0)}", by=NAME, kind="pausing")


def due(job: Job) -> bool:
    """Whether all ranks, which stand before ``job.step``, are to stand there for now. A loop that is over just ends."""
    return job.pause_at is not None and job.step >= job.pause_at and job.leaving is None and not job.over


def stand(job: Job) -> list[Command]:
    """All are there."""
    job.stage = Stage.PAUSED
    return [Note("paused", detail={"step": job.step}), *job.to_all(Paused(job.generation))]


def refuses_to_end(job: Job) -> str:
    """Why there is no pause that could end; empty if there is one, or one that was asked for."""
    return f"the job is not paused ({job.stage.value})" if job.pause_at is None or job.leaving is not None else ""


def end(job: Job) -> list[Command]:
    """The pause, or the wish for one, is taken back."""
    job.pause_at = None
    if job.stage is not Stage.PAUSED:
        return [Note("pause_withdrawn"), SetPause(-1)]
    job.stage = Stage.RUNNING
    detail: dict[str, object] = {"step": job.step}
    if job.plan is not None:
        detail["commits"] = job.plan.commits
    return [SetPause(-1), Note("resumed", detail=detail), *job.resume()]


def described(step: int) -> str:
    """The step of a wish, for people."""
    return f"step {step}" if step else "the next step"
