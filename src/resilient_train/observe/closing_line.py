"""What a run came to, in one line: the last that the console is told."""

from __future__ import annotations

from collections.abc import Sequence

from resilient_train.events import Event
from resilient_train.faults import Injection
from resilient_train.observe.fields import number_of
from resilient_train.observe.timeline import RecoveryOutcome, Run, read_run

_SHOWN = 5
"""Planned faults that are named."""


def summary(events: Sequence[Event], code: int) -> str:
    """How long, how far, what was repaired, what was lost, and the newest checkpoint."""
    run = read_run(events)
    seconds = (max(e.time_ns for e in events) - min(e.time_ns for e in events)) / 1e9 if events else 0.0
    end = "done" if code == 0 else f"ended with exit code {code}"
    parts = [_progress(events), *_repairs(run)]
    if run.saved.written:
        newest = run.saved.written[-1]
        parts.append(f"newest checkpoint: step {newest.step} ({newest.path})")
    if any(event.kind == "session_end" and number_of(event, "nan_tensors") for event in events):
        parts.append("the state at the end holds NaN")
    if run.otherwise:
        parts.append(f"results may differ from an undisturbed run's ({', '.join(run.otherwise)}: see above)")
    return f"{end} after {seconds:.0f} s: {', '.join(parts)}"


def missed(events: Sequence[Event], plan: Sequence[Injection]) -> str:
    """The faults of a plan (``--faults``) that did not happen; empty if all did."""
    happened = [
        (e.rank, e.incarnation, e.step, e.phase, e.detail.get("kind"), e.detail.get("at"))
        for e in events
        if e.kind == "injected" and "order" not in e.detail
    ]
    left = list[Injection]()
    for clause in plan:
        where = clause.rank, clause.incarnation, clause.step, clause.phase, clause.kind, clause.at
        if where in happened:
            happened.remove(where)
        else:
            left.append(clause)
    if not left:
        return ""
    shown = "; ".join(each.describe() for each in left[:_SHOWN])
    shown += f"; and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    why = "the job did not come to the step, or that step not to the place (in what torch.compile has compiled there "
    why += "is none, nor in a backward pass that gives the model's middle parameter no gradient"
    if any(each.phase == "APPLIED" for each in left):
        why += "; APPLIED is none where a Session has undo=True"
    why += ")"
    if replaced := sorted({each.rank for each in left if _had_ended(each, events)}):
        ranks = "rank" if len(replaced) == 1 else "ranks"
        why += f"; {ranks} {', '.join(map(str, replaced))} had another process by then (incarnation=N names it)"
    return f"{len(left)} of {_count(len(plan), 'planned fault', 'planned faults')} did not happen ({shown}): {why}"


def _had_ended(clause: Injection, events: Sequence[Event]) -> bool:
    """Whether a later process took the place of the one that it is for before that came to the step: nobody was further
    (and no rank is two steps behind another).
    """
    later = [each.time_ns for each in events if each.rank == clause.rank and each.incarnation > clause.incarnation]
    before = [each for each in events if later and each.time_ns < min(later)]
    own = any(
        (each.rank, each.incarnation) == (clause.rank, clause.incarnation) and each.step >= clause.step
        for each in before
    )
    return bool(later) and not own and all(each.step <= clause.step for each in before)


def _progress(events: Sequence[Event]) -> str:
    if not any(event.kind == "started" for event in events):
        plain = any(event.kind == "plain_loop" for event in events)
        return "its Session was a plain loop" if plain else "no Session came to its first step"
    steps = [number for e in events if e.kind == "session_end" and (number := number_of(e, "steps")) is not None]
    if steps:
        return f"{max(steps)} steps"
    ends = [event for event in events if event.kind in ("job_end", "finished")]
    furthest = [number for event in ends if (number := number_of(event, "commits")) is not None]
    return f"{max(furthest)} updates" if furthest else "the number of steps is not known"


def _repairs(run: Run) -> list[str]:
    resumed = [recovery for recovery in run.recoveries if recovery.outcome is RecoveryOutcome.RESUMED]
    found = [_count(len(resumed), "recovery", "recoveries")]
    if run.restarts:
        found.append(f"all ranks started again {_count(run.restarts, 'time', 'times')}")
    if run.recoveries:
        found.append(f"{_count(run.steps_redone, 'step', 'steps')} redone")
        found.append(f"{_count(run.commits_lost, 'committed step', 'committed steps')} lost in recoveries")
    if run.saved.updates_lost:
        found.append(f"{_count(run.saved.updates_lost, 'update', 'updates')} lost otherwise")
    stood = [pause for pause in run.pauses if pause.stood_ns is not None]
    if stood:
        found.append(f"paused {_count(len(stood), 'time', 'times')}, {run.paused_s:.0f} s in all")
    return found


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
