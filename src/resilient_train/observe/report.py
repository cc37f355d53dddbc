"""Says to a person, or to a program, what a run went through; made from a ``timeline.Run`` alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import msgspec

from resilient_train.observe.deviations import Deviation
from resilient_train.observe.paused import PauseOutcome, PauseRecord
from resilient_train.observe.saved import NotSaved, Origin, Saved
from resilient_train.observe.slower import Straggler
from resilient_train.observe.timeline import Copy, NanSeen, PhaseSpan, Recovery, RecoveryOutcome, Run

_BAR_WIDTH = 40
_LABEL_WIDTH = 8
_MEGABYTE = 1e6
_UNEVEN = 1.1
"""A rank that computes so many times as long as its peers is told, also if it always has."""
_STYLES = {"DETECT": "magenta", "STOP": "red", "REPLACE": "yellow", "AGREE": "blue", "REBUILD": "cyan"}
_STYLES |= {"RESTORE": "green", "RESUME": "bright_green", "total": "bold"}


class Line(msgspec.Struct, frozen=True):
    """A line of the report, without its end; ``style`` is a colour of rich."""

    text: str
    style: str = ""


def as_dict(run: Run) -> dict[str, Any]:
    """The report as a JSON-able object; times in milliseconds, unknown values None."""
    return {
        "world_size": run.world_size,
        "finished": run.finished,
        "exit_code": run.exit_code,
        "end_reason": run.end_reason,
        "digest": run.digest,
        "restarts": run.restarts,
        "replacements": run.replacements,
        "steps_redone": run.steps_redone,
        "committed_steps_lost": run.commits_lost,
        "updates_lost": run.saved.updates_lost,
        "otherwise": list(run.otherwise),
        "saved": saved_as_dict(run.saved),
        "deviations": msgspec.to_builtins(run.deviations),
        "nan": msgspec.to_builtins(run.nan),
        "stragglers": msgspec.to_builtins(run.stragglers),
        "compute": {str(rank): msgspec.to_builtins(pace) for rank, pace in sorted(run.paces.items())},
        "recoveries": [recovery_as_dict(recovery) for recovery in run.recoveries],
        "paused_s": run.paused_s,
        "pauses": [pause_as_dict(pause) for pause in run.pauses],
    }


def saved_as_dict(saved: Saved) -> dict[str, Any]:
    """What was saved, restored and lost as a JSON-able object; times in seconds, unknown values None."""
    return {
        "written": len(saved.written),
        "newest": msgspec.to_builtins(saved.written[-1]) if saved.written else None,
        "median_s": saved.median_s,
        "left_out": msgspec.to_builtins(saved.left_out),
        "failed": msgspec.to_builtins(saved.failed),
        "off": {str(rank): reason for rank, reason in saved.off.items()},
        "passed_over": dict(saved.passed_over),
        "begun_from": msgspec.to_builtins(saved.begun_from),
        "ways_back": [msgspec.to_builtins(way) | {"updates_lost": way.updates_lost} for way in saved.ways_back],
        "lost_at_end": saved.lost_at_end,
    }


def recovery_as_dict(recovery: Recovery) -> dict[str, Any]:
    """One recovery as a JSON-able object; times in milliseconds."""
    return {
        "generation": recovery.generation,
        "outcome": str(recovery.outcome),
        "lost": list(recovery.lost),
        "reason": recovery.reason,
        "seen_by": {str(rank): by for rank, by in recovery.seen_by.items()},
        "last_words": list(recovery.last_words),
        "injected": msgspec.to_builtins(recovery.injected),
        "total_ms": round(recovery.total_ms, 3),
        "phases_ms": {span.phase: round(span.ms, 3) for span in recovery.spans},
        "starts": {str(rank): start for rank, start in recovery.starts.items()},
        "copies": msgspec.to_builtins(recovery.copies),
        "commits": recovery.commits,
        "rolled_forward": list(recovery.rolled_forward),
        "redone_by": list(recovery.redone_by),
        "redone_step": recovery.redone_step,
        "fenced": list(recovery.fenced),
        "committed_steps_lost": recovery.commits_lost,
    }


def pause_as_dict(pause: PauseRecord) -> dict[str, Any]:
    """One pause as a JSON-able object; times in seconds, unknown values None."""
    return {
        "by": pause.by,
        "at_step": pause.at_step,
        "outcome": str(pause.outcome),
        "step": pause.step,
        "wait_s": pause.wait_s,
        "gather_s": pause.gather_s,
        "length_s": pause.length_s,
        "inside": list(pause.inside),
    }


def lines(run: Run) -> list[Line]:
    """The whole report."""
    found = [Line(_headline(run), "bold")]
    for recovery in run.recoveries:
        found += [Line(""), *recovery_lines(recovery)]
    for pause in run.pauses:
        found += [Line(""), *pause_lines(pause)]
    for about in (deviation_lines(run.deviations), nan_lines(run.nan), pace_lines(run), saved_lines(run.saved)):
        found += [Line(""), *about] if about else []
    found += [Line(""), *_ending(run)]
    return found


def deviation_lines(deviations: Iterable[Deviation]) -> list[Line]:
    """How often each rank came to other bits than it should, and where; nothing if none did."""
    by_rank: dict[tuple[int, str], list[str]] = {}
    for each in deviations:
        where = f"after {_updates(each.at)}" if each.what == "held" else f"in step {_known(each.at)}"
        by_rank.setdefault((each.rank, each.device), []).append(f"{each.what} {where}")
    return [
        Line(f"rank {rank}{on} had other bits than it should {_times(len(found))}: {_first_and_last(found)}", "red")
        for (rank, device), found in sorted(by_rank.items())
        for on in [f" ({device})" if device else ""]
    ]


def nan_lines(seen: Iterable[NanSeen]) -> list[Line]:
    """When the state became NaN; nothing if it never did."""
    return [
        Line(f"{each.told} after {_updates(each.commits)}{before}", "red")
        for each in seen
        for before in [f"; there was none after {_updates(each.without)}" if each.without is not None else ""]
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _first_and_last(found: Sequence[str]) -> str:
    return found[0] if len(found) == 1 else f"first {found[0]}, last {found[-1]}"


def pace_lines(run: Run) -> list[Line]:
    """Who became slower than it was, and who computed for longer than the others at the end; nothing if nobody did."""
    found = [Line(_slower(each), "yellow") for each in run.stragglers]
    for rank, pace in sorted(run.paces.items()):
        if pace.ratio >= _UNEVEN:
            told = f"rank {rank} computed {pace.ratio:.2f} times as long as its peers at the end"
            found.append(Line(f"{told}: {pace.compute_ms:.3g} ms a step"))
    return found


def saved_lines(saved: Saved) -> list[Line]:
    """What was saved, what from, and what was lost; nothing for a run without any of it."""
    found = [Line(f"began from {_origin(saved.begun_from)}")] if saved.begun_from else []
    found += [Line(f"passed over: {path}: {reason}", "yellow") for path, reason in saved.passed_over.items()]
    if saved.written:
        newest = saved.written[-1]
        took = "" if saved.median_s is None else f" (median {saved.median_s:.3g} s)"
        found.append(Line(f"checkpoints written: {len(saved.written)}{took}"))
        place = f"step {_known(newest.step)}, after {_updates(newest.commits)}"
        found.append(Line(f"  newest: {place}: {newest.path or '?'}"))
    found += _troubled("left out", saved.left_out, "yellow") + _troubled("failed", saved.failed, "red")
    found += [Line(f"rank {rank} took no more snapshots: {reason}", "yellow") for rank, reason in saved.off.items()]
    for way in saved.ways_back:
        back = f"from after {_updates(way.furthest)} to {_origin(way.origin)}"
        lost = "an unknown number of updates" if way.updates_lost is None else _updates(way.updates_lost)
        style = "" if way.updates_lost == 0 else "red"
        found.append(Line(f"all ranks went back {back}; lost: {lost} ({way.reason})", style))
    if saved.lost_at_end:
        found.append(Line(f"at the job's end no checkpoint had the last {_updates(saved.lost_at_end)}", "red"))
    elif saved.lost_at_end == 0:
        found.append(Line("at the job's end no update was lost"))
    return found


def recovery_lines(recovery: Recovery) -> list[Line]:
    """One recovery: who was lost, a bar per phase on a common scale, and what happened to the state."""
    good = recovery.outcome is RecoveryOutcome.RESUMED
    found = [Line(_title(recovery), "bold" if good else "bold red")]
    found += [Line(f"  injected: {_injection(recovery)}")] if recovery.injected else []
    found += [Line(f"  {words}") for words in recovery.last_words]
    begin, end = _scale(recovery)
    for span in recovery.spans:
        found.append(Line(f"  {_bar(span.phase, span, begin, end)}", _STYLES.get(span.phase, "")))
    total = PhaseSpan("total", recovery.fault_ns, recovery.end_ns)
    found.append(Line(f"  {_bar('total', total, begin, end)}", _STYLES["total"]))
    if recovery.starts:
        found.append(
            Line("  started: " + ", ".join(f"rank {r} {start}" for r, start in sorted(recovery.starts.items())))
        )
    found += [Line(f"  state: {_copy(copy)}") for copy in recovery.copies]
    found.append(Line(f"  {_steps(recovery)}"))
    if recovery.fenced:
        found.append(Line(f"  fenced: {_ranks(recovery.fenced)}", "yellow"))
    if recovery.commits_lost:
        found.append(Line(f"  COMMITTED STEPS LOST: {recovery.commits_lost}", "bold red"))
    return found


def pause_lines(pause: PauseRecord) -> list[Line]:
    """One pause: who asked, where all stood, how soon and for how long, and what happened meanwhile."""
    if pause.stood_ns is None:
        where = f"before step {pause.at_step}" if pause.at_step else "before the next step"
        return [Line(f"pause {where}, asked for by {_asker(pause)}: {pause.outcome}", "yellow")]
    found = [Line(f"pause before step {_known(pause.step)}, asked for by {_asker(pause)}: {pause.outcome}", "bold")]
    gathered = "" if pause.gather_s is None else f" ({_seconds(pause.gather_s)} after the first)"
    found.append(Line(f"  all ranks stood {_seconds(pause.wait_s or 0.0)} after the question{gathered}"))
    still = ", and stand" if pause.outcome is PauseOutcome.UNFINISHED else ""
    found.append(Line(f"  for {_seconds(pause.length_s)}{still}"))
    return found + [Line(f"  meanwhile: {each}") for each in pause.inside]


def _asker(pause: PauseRecord) -> str:
    return "an operator" if pause.by == "operator" else pause.by


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def show(report: Iterable[Line], file: TextIO | None = None) -> None:
    """Prints the lines to ``file`` (stdout), in colour on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file or sys.stdout, highlight=False, soft_wrap=True)
    for line in report:
        console.print(Text(line.text, style=line.style))


def _headline(run: Run) -> str:
    world = "world size unknown" if run.world_size is None else f"{run.world_size} ranks"
    count = len(run.recoveries)
    return f"{world}, {count} {'recovery' if count == 1 else 'recoveries'}"


def _ending(run: Run) -> list[Line]:
    repaired = f"steps redone: {run.steps_redone}   committed steps lost: {run.commits_lost}"
    lost = run.saved.updates_lost
    found = [Line(f"{repaired} in recoveries, {lost} otherwise (see above)" if lost else repaired)]
    if run.otherwise:
        kinds = ", ".join(run.otherwise)
        text = f"results may differ from an undisturbed run's: {kinds} (docs/reference/events.md)"
        found.append(Line(text, "yellow"))
    if run.restarts:
        found.append(Line(f"all ranks started again together: {run.restarts} times", "yellow"))
    if run.exit_code is not None and run.exit_code != 0:
        found.append(
            Line(f"the job ended with exit code {run.exit_code}: {run.end_reason or 'no reason given'}", "red")
        )
    elif run.finished:
        found.append(Line("the job finished", "green"))
    else:
        found.append(Line("the events do not say how the job ended: it may still be running", "yellow"))
    if run.digests:
        equal = "parameters equal on all ranks, digest"
        if run.replicas:
            equal = f"parts equal on all ranks that hold the same, {len(run.replicas)} digests"
        text = f"{equal} {run.digest}" if run.digest else _digests(run)
        found.append(Line(text, "" if run.digest else "yellow"))
    return found


def _slower(straggler: Straggler) -> str:
    times = "?" if straggler.ratio is None else f"{straggler.ratio:.2f}"
    until = "" if straggler.until is None else f", until step {straggler.until}"
    return f"rank {straggler.rank} computed {times} times slower since step {_known(straggler.since)}{until}"


def _origin(origin: Origin | None) -> str:
    if origin is None:
        return "the beginning: nothing was saved"
    path = f" ({origin.path})" if origin.path else ""
    return f"{origin.source or 'an unknown source'}, after {_updates(origin.commits)}{path}"


def _troubled(what: str, troubles: Sequence[NotSaved], style: str) -> list[Line]:
    if not troubles:
        return []
    last = troubles[-1]
    return [Line(f"checkpoints {what}: {len(troubles)}; the last, of step {_known(last.step)}: {last.reason}", style)]


def _updates(count: int | None) -> str:
    return f"{_known(count)} update{'' if count == 1 else 's'}"


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


def _digests(run: Run) -> str:
    by_rank = ", ".join(f"rank {rank}: {digest}" for rank, digest in sorted(run.digests.items()))
    return f"digests of the parameters that ranks wrote: {by_rank}"


def _title(recovery: Recovery) -> str:
    lost = f"{_ranks(recovery.lost)} lost" if recovery.lost else "nobody lost"
    seen = ", ".join(sorted(set(recovery.seen_by.values())))
    parts = [f"recovery {recovery.generation}: {lost}", f"seen by {seen}" if seen else "", recovery.reason]
    outcome = "" if recovery.outcome is RecoveryOutcome.RESUMED else f" - {recovery.outcome}"
    return "; ".join(part for part in parts if part) + outcome


def _injection(recovery: Recovery) -> str:
    return ", ".join(
        f"{event.kind} rank {event.rank} at step {event.step}{f' in {event.phase}' if event.phase else ''} ({event.at})"
        for event in recovery.injected
    )


def _scale(recovery: Recovery) -> tuple[int, int]:
    begin = min([recovery.fault_ns, *(span.start_ns for span in recovery.spans)])
    end = max([recovery.end_ns, *(span.end_ns for span in recovery.spans)])
    return begin, end


def _bar(label: str, span: PhaseSpan, begin: int, end: int) -> str:
    """``STOP      5.3 ms  |   ####    |``: where in the recovery the phase lies, and how long it is."""
    length = max(1, end - begin)
    first = min(_BAR_WIDTH - 1, (span.start_ns - begin) * _BAR_WIDTH // length)
    last = min(_BAR_WIDTH, max(first + 1, -(-(span.end_ns - begin) * _BAR_WIDTH // length)))
    bar = " " * first + "█" * (last - first) + " " * (_BAR_WIDTH - last)
    return f"{label:<{_LABEL_WIDTH}}{span.ms:>9.1f} ms  ▏{bar}▏"


def _copy(copy: Copy) -> str:
    source = f"rank {copy.source}" if copy.source >= 0 else "an unknown rank"
    text = f"{source} -> rank {copy.target}"
    if copy.size_bytes is not None:
        text += f", {copy.size_bytes / _MEGABYTE:.1f} MB"
    if copy.duration_ms is not None:
        text += f" in {copy.duration_ms:.1f} ms"
    return text + (f" ({copy.way})" if copy.way else "")


def _steps(recovery: Recovery) -> str:
    if recovery.redone_by:
        return f"step {recovery.redone_step} redone by {_ranks(recovery.redone_by)}"
    if recovery.rolled_forward:
        return f"no step redone; {_ranks(recovery.rolled_forward)} applied the gradients at hand"
    return "no step redone" if recovery.commits is not None else "no plan was made"


def _ranks(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
