"""What a person at the console is told of an event, in one line; events that concern nobody are left out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def line(text: str) -> str:
    """One of our lines on the console: when it was written, and by whom."""
    return f"{time.strftime('%H:%M:%S')} resilient-run: {text}"


def told(kind: str, generation: int, took_ms: float, detail: dict[str, Any]) -> Iterator[str]:
    """The lines of one event. ``took_ms``: since the last fault."""
    if kind == "fault":
        lost = ", ".join(map(str, detail["lost"])) or "none"
        yield f"recovery {generation}: {detail['reason']} (lost: {lost}); survivors keep their state"
    elif kind == "pause_asked":
        where = f"step {detail['at_step']}" if detail["at_step"] else "the next step"
        yield f"a pause is asked for ({detail['by']}): all ranks stop before {where}"
    elif kind == "pause_withdrawn":
        yield "the pause that was asked for is taken back"
    elif kind == "paused":
        yield f"paused before step {detail['step']}: all ranks stand; `resilient-train resume` lets them go on"
    elif kind == "resumed" and "step" in detail:
        yield f"the pause is over after {detail.get('paused_s', 0):.1f} s: training again from step {detail['step']}"
    elif kind == "finished" and "pause_at" in detail:
        yield f"the training is over; the pause that was asked for, before step {detail['pause_at']}, was not reached"
    elif kind == "anomaly" and detail["again"]:
        yield detail["reason"]
    elif kind == "late_anomaly" and not detail["goes_back"]:
        raised = detail["what"] == "raised"
        then = "this is the script's own error" if raised else "it is written down, and training goes on"
        yield f"{detail['told']}: {then}"
    elif kind == "holds_nan" and detail["first"] and not detail["may_go_back"]:
        yield _nan(detail["told"], detail["commits"], detail["without"])
    elif kind == "resumed" and "verifies" not in detail:
        yield f"recovery {generation}: training again after {took_ms:.0f} ms, {detail['commits']} updates committed"
    elif kind in ("held_wrong", "verified", "unshared"):
        yield from _of_repeated(kind, detail)
    elif kind == "assembled":
        done = f"{detail['commits']} updates done"
        yield f"recovery {generation}: all ranks stand at one step after {took_ms:.0f} ms, {done}"
    elif kind == "leaving":
        yield f"{detail['reason']}. The state is saved, then the job ends"
    elif kind == "save_last" and not detail["exact"]:
        yield (
            "no survivor stands at the start of an update: what stands behind the update was cut or has failed, and is "
            "saved as one rank has it; collectives that it called there without the others gave it its own values, and "
            "what its script says or raises from here on comes of that"
        )
    elif kind == "message_carried":
        yield detail["told"]
    elif kind == "restart_all":
        yield f"{detail['reason']}. All ranks start again"
    elif kind == "spared":
        named = ", ".join(map(str, detail["ranks"]))
        only = "nobody else has its state, so it is not killed"
        if "saved" in detail:
            only += f"; all go back to update {detail['saved']} if it does not come in the time that this would cost"
        yield f"recovery {generation}: rank {named} {detail['reason']}; {only}"
    elif kind == "straggler":
        yield (
            f"rank {detail['rank']} computes {detail['ratio']:.2f} times slower since step {detail['since']} "
            f"({detail['compute_ms']:.3g} ms a step; {detail['before_ms']:.3g} ms before)"
        )
    elif kind == "straggler_over":
        yield f"rank {detail['rank']} keeps up with the others as before, since step {detail['since']}"
    elif kind == "standby_off":
        yield f"all processes start cold, since they can't be forked: {detail['reason']}"
    elif kind == "standby_shallow":
        yield f"replacements are only forked with their imports done, not {detail['asked']}: {detail['reason']}"
    elif kind == "job_end" and detail["code"]:
        yield f"the job ends: {detail['reason']}"


def _of_repeated(kind: str, detail: dict[str, Any]) -> Iterator[str]:
    """Of what was computed once more."""
    if kind == "held_wrong":
        named, anew = ", ".join(map(str, detail["ranks"])), detail.get("anew", ())
        verdict = f"rank {named} had held something else" if not anew else (
            f"as all of them, {_ranks(anew)} began anew, in another's place: if the training depends on something that "
            "is not registered, this is not what the undisturbed run would hold. `resilient-train drill` tells"
        )  # fmt: skip
        yield (
            f"all have trained up to update {detail['commits']} once more, and hold what the replicas of rank {named} "
            f"had held: {verdict}"
        )
    elif kind == "verified" and detail.get("everywhere"):
        yield (
            f"step {detail['step']} came to other bits on every rank when it was computed again, and the third time to "
            "those of one of the two: as a rule a body changes something for good that is not registered (a flag, a "
            "hook that it hangs on once), and from here the bits may not be those of a run without "
            "RESILIENT_VERIFY_EVERY. `resilient-train drill` tells (docs/how-to/silent-errors.md)"
        )
    elif kind == "unshared":
        yield (
            f"RESILIENT_VERIFY_INPUTS=neighbour has no effect: {detail['reason']}. Each rank computes its own step "
            "twice, and no replica's"
        )


def _nan(told: str, commits: int, without: int) -> str:
    before = f"there was none after update {without}. " if without >= 0 else ""
    return (
        f"{told} after update {commits}, and its replicas as a rule; {before}NaN stays and spreads, so what is trained "
        "from here on is of no use. Training goes on, since the script may have come to it by itself; with "
        'MS_ENABLE_TFT="{TRE:1}" all go back to before, once (docs/how-to/silent-errors.md)'
    )


def newest_told(told: Mapping[int, str], silent: Sequence[int]) -> str:
    """Which collective each rank has entered last; those that say the same stand together."""
    who = dict[str, list[int]]()
    for rank, text in told.items():
        who.setdefault(text, []).append(rank)
    parts = [f"{_ranks(ranks)} {text}" for text, ranks in who.items()]
    return "newest collectives: " + "; ".join(parts + ([f"{_ranks(silent)} did not answer"] if silent else []))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def pause_told(paused_s: float, pids: Sequence[int]) -> str:
    """That no rank runs. ``pids``: the processes that are stopped."""
    listed = " ".join(map(str, pids))
    why = f"stopped (SIGSTOP); `kill -CONT {listed}` continues them" if pids else "no sign of life from any process"
    return f"no rank has run for {paused_s:.0f} s: {why}. Nobody is to blame, so the job waits"


def end_of(code: int | None) -> str:
    """How a process ended, behind "rank N" on a line."""
    if code is None:
        return "died"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
