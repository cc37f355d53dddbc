"""When to replace, when to restart everybody, when to give up."""

from __future__ import annotations

import msgspec

DEFAULT_MAX_RESTARTS = 100
"""Replacements of a job whose operator set no ``--max-restarts``. torchrun's default of 0 would mean: never recover."""


class Policy(msgspec.Struct, frozen=True):
    """Bounds on recovery.

    ``max_restarts`` counts replacements over the job's life, of one rank or of all at once. A rank that dies
    ``max_stuck`` times without a single committed update in between ends the job: one more process will not cure it.
    """

    max_restarts: int = DEFAULT_MAX_RESTARTS
    restart_on_error: bool = False
    """Restart everybody when a script without a Session exits with an error, as ``torchrun --max-restarts N`` does."""
    max_stuck: int = 5
    max_repairs: int = 20
    """Recoveries that cost no process (HCCE, UCE) within ``repairs_window`` committed updates. What fails more often is
    not cured by rebuilding: the rank that reports it is replaced, or, where that is nobody, the job ends.
    """
    repairs_window: int = 100
    max_deviations: int = 0
    """A rank whose device has computed other bits so often is not replaced: a new process would get the same one."""
    neighbours: bool = False
    """What is computed twice is computed from the inputs of a replica as well, which has computed from them too."""
    replace: bool = True
    """False when the ``ARF`` switch is off: who is lost ends the job."""
    rebuild: bool = True
    """False when the ``HCCE`` switch is off: a collective that failed although nobody died ends the job."""
    mend: bool = True
    """False when the ``UCE`` switch is off."""
    save_last: bool = True
    """False when the ``TTP`` switch is off: a job that has to end ends at once."""
    pause: bool = True
    """False when the ``TSP`` switch is off: nobody can have the job stand still."""


def why_give_up(policy: Policy, *, used: int, lost: int, stuck: int, goes_back: bool = False) -> str:
    """The reason to end the job instead of replacing ``lost`` more ranks; empty if there is none. ``used``: how often
    ranks were replaced, or all started again. ``goes_back``: nobody is lost, all begin anew behind a saved state, and
    so the switch for replacements is not asked.
    """
    if not policy.replace and not goes_back:
        return "replacing lost ranks is switched off (MS_ENABLE_TFT has no ARF:1)"
    if used + lost > policy.max_restarts:
        before = f"ranks were replaced, or all started again, {used} times before this fault"
        return f"--max-restarts {policy.max_restarts} is used up ({before})"
    if stuck >= policy.max_stuck:
        return f"it died {stuck} times in a row without one committed update in between"
    return ""
