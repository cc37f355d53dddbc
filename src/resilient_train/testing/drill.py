"""Runs a user's own script undisturbed, and then with faults, and says of each fault how it was recovered from.

The faults are drawn from a seed: steps over the whole run, ranks, kinds and places in turn at random. Whether the bits
are the same is known at the end, for the run as a whole.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from resilient_train.child import LAUNCHER_LOG, check_unused, clean_environ, launched, log_tail
from resilient_train.errors import ConfigError
from resilient_train.events import Event
from resilient_train.faults import COST_NO_PROCESS, INJECTABLE, PLACES, TARGETS, UCE_PLACES, Injection
from resilient_train.observe.report import Line
from resilient_train.observe.sinks import EVENTS_FILE, read_events
from resilient_train.observe.timeline import Outcome, Recovery, Run, read_run

DEFAULT_KINDS = ("kill", "stop", "hcce", "uce")
"""Not ``loop``: it takes as long as the hang limit (``RESILIENT_HANG_TIMEOUT_S``) to be noticed."""
_EVERY_STEP = (("COMPUTE", "start"), ("COMPUTE", "forward"), ("COMPUTE", "backward"), ("BETWEEN", "start"))
_EVERY_UPDATE = tuple((phase, at) for phase in ("READY", "UPDATING", "APPLIED") for at in PLACES[phase])
_STEPS_MIN = 6
_SPACING = 2
_PER_FAULT_S = 180.0

Tell = Callable[[str], None]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to drill. Raises ConfigError for a drill that can't be."""

    command: tuple[str, ...]
    run_dir: Path
    ranks: int = 2
    faults: int = 6
    seed: int = 0
    kinds: tuple[str, ...] = DEFAULT_KINDS
    limit_s: float = 3600.0
    """For the undisturbed run; the disturbed one gets three times what that one took, and a while per fault."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("drill: give the script behind --, as in: resilient-train drill -- train.py --epochs 1")
        if self.ranks < 2:
            raise ConfigError(f"--ranks {self.ranks}: with fewer than 2 there is no replica to recover from")
        if self.faults < 1:
            raise ConfigError(f"--faults {self.faults}: a drill needs at least one")
        for kind in self.kinds:
            if kind not in INJECTABLE:
                raise ConfigError(f"--kinds: {kind!r} is not one of {', '.join(INJECTABLE)}")
        check_unused(self.run_dir)


class Blow(msgspec.Struct, frozen=True):
    """One planned fault and what became of it. ``strategy`` is empty if it did not happen."""

    plan: str
    happened: bool
    strategy: str
    recovered: bool
    recovery_ms: float | None


class Result(msgspec.Struct, frozen=True):
    """``problems`` is empty after a drill that lost nothing."""

    options: Options
    blows: tuple[Blow, ...]
    identical: bool
    steps: int
    steps_redone: int
    commits_lost: int
    problems: tuple[str, ...]


def drill(options: Options, tell: Tell) -> Result:
    """Runs both. Raises OSError if the launcher can't be started."""
    tell(f"{' '.join(options.command)}: undisturbed, {options.ranks} ranks ...")
    begin = time.monotonic()
    code, expected, events = run_once(options, "undisturbed", "", options.limit_s)
    seconds = time.monotonic() - begin
    steps = min((event.detail.get("steps", 0) for event in events if event.kind == "session_end"), default=0)
    problem = _unfit(options, code, expected, steps)
    if problem:
        return Result(options, (), False, steps, 0, 0, (problem,))
    clauses = plan(options, steps, updates_every_step=_updates(events) == steps)
    tell(f"  {steps} steps in {seconds:.0f} s; now with {len(clauses)} faults ...")
    limit_s = 3 * seconds + _PER_FAULT_S * len(clauses)
    text = "; ".join(clause.describe() for clause in clauses)
    code, disturbed, events = run_once(options, "disturbed", text, limit_s)
    blows = tuple(outcome_of(clause, events, disturbed.recoveries) for clause in clauses)
    return Result(
        options,
        blows,
        code == 0 and disturbed.digest is not None and disturbed.digest == expected.digest,
        steps,
        disturbed.steps_redone,
        disturbed.commits_lost,
        tuple(_problems(options, code, expected, disturbed, blows)),
    )


def plan(options: Options, steps: int, *, updates_every_step: bool) -> list[Injection]:
    """The faults, by step. A killed or hung rank's next fault is meant for its replacement."""
    chance = random.Random(options.seed)
    candidates = range(1, steps - 1, _SPACING)
    chosen = sorted(chance.sample(candidates, min(options.faults, len(candidates))))
    places = _EVERY_STEP + (_EVERY_UPDATE if updates_every_step else ())
    incarnations = [0] * options.ranks
    clauses = []
    for number, step in enumerate(chosen):
        kind = options.kinds[number % len(options.kinds)]
        phase, at = chance.choice([each for each in UCE_PLACES if each in places] if kind == "uce" else places)
        target = chance.choice(TARGETS) if kind == "uce" else ""
        rank = chance.randrange(options.ranks)
        clauses.append(Injection(kind, rank, phase, at, step=step, incarnation=incarnations[rank], target=target))
        incarnations[rank] += kind not in COST_NO_PROCESS
    return clauses


def run_once(options: Options, name: str, faults: str, limit_s: float) -> tuple[int | None, Run, list[Event]]:
    """The script once, with these faults: exit code (None: it took too long), story, events."""
    run_dir = (options.run_dir / name).absolute()
    arguments = ["--nproc-per-node", str(options.ranks), "--faults", faults, *options.command]
    environ = clean_environ(switches=True)
    environ.pop("RESILIENT_FAULTS", None)
    environ.pop("RESILIENT_RUN_DIR", None)
    with launched(run_dir, arguments, environ) as process:
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
    path = run_dir / EVENTS_FILE
    events = read_events(path) if path.exists() else []
    return code, read_run(events), events


def _updates(events: Sequence[Event]) -> int:
    return max((event.detail.get("commits", 0) for event in events if event.kind == "session_end"), default=0)


def _unfit(options: Options, code: int | None, story: Run, steps: int) -> str:
    log = options.run_dir / "undisturbed" / LAUNCHER_LOG
    if code is None:
        return f"the undisturbed run took longer than {options.limit_s:.0f} s (--limit-s)"
    if code:
        return f"the undisturbed run ended with exit code {code}; its log {log} ends with\n{log_tail(log)}"
    if story.digest is None:
        return "the script has no Session that all ranks left well: see docs/tutorial.md for the lines that it needs"
    if steps < _STEPS_MIN:
        return f"the script makes {steps} steps; a drill needs at least {_STEPS_MIN}"
    return ""


def outcome_of(clause: Injection, events: Sequence[Event], recoveries: Sequence[Recovery]) -> Blow:
    """What became of one clause of the plan, from the events of the run."""
    hits = [e for e in events if e.kind == "injected" and _is(clause, e)]
    if not hits:
        return Blow(clause.describe(), False, "", False, None)
    after = [recovery for recovery in recoveries if recovery.end_ns >= hits[0].time_ns]
    end = next((recovery for recovery in after if recovery.outcome is Outcome.RESUMED), None)
    if end is None:
        return Blow(clause.describe(), True, "none", False, None)
    hung = any(e.kind == "hung" and e.time_ns >= hits[0].time_ns and clause.rank in e.detail["ranks"] for e in events)
    lost = any(clause.rank in recovery.lost for recovery in after[: after.index(end) + 1])
    strategy = ("HANG, ARF" if hung and clause.kind in ("stop", "loop") else "ARF") if lost else clause.kind.upper()
    return Blow(clause.describe(), True, strategy, True, (end.end_ns - hits[0].time_ns) / 1e6)


def _is(clause: Injection, event: Event) -> bool:
    found = (event.rank, event.incarnation, event.step, event.phase, event.detail.get("at"))
    return found == (clause.rank, clause.incarnation, clause.step, clause.phase, clause.at)


def _problems(options: Options, code: int | None, expected: Run, disturbed: Run, blows: Sequence[Blow]) -> list[str]:
    log = options.run_dir / "disturbed" / LAUNCHER_LOG
    found = [f"{blow.plan}: not recovered" for blow in blows if blow.happened and not blow.recovered]
    if code is None:
        return [*found, f"the disturbed run took too long and was ended; its log {log} ends with\n{log_tail(log)}"]
    if code:
        return [*found, f"the disturbed run ended with exit code {code}; its log {log} ends with\n{log_tail(log)}"]
    if not any(blow.happened for blow in blows):
        found.append("not one of the planned faults happened: the script leaves no room for them")
    if disturbed.digest != expected.digest:
        hint = "if two undisturbed runs differ as well, the script is not deterministic"
        found.append(f"parameters differ: digest {disturbed.digest}, undisturbed {expected.digest}; {hint}")
    if disturbed.rank_digests != expected.rank_digests:
        found.append("some rank's random numbers or place in the data differ at the end")
    if disturbed.commits_lost:
        found.append(f"{disturbed.commits_lost} committed steps were lost")
    return found


def as_dict(result: Result) -> dict[str, Any]:
    """The result as a JSON-able object; times in milliseconds."""
    return {
        "ok": not result.problems,
        "identical": result.identical,
        "problems": list(result.problems),
        "faults": msgspec.to_builtins(result.blows),
        "seed": result.options.seed,
        "ranks": result.options.ranks,
        "steps": result.steps,
        "steps_redone": result.steps_redone,
        "committed_steps_lost": result.commits_lost,
        "run_dir": str(result.options.run_dir.absolute()),
    }


def as_lines(result: Result) -> list[Line]:
    """The result for a person."""
    found = []
    width = max((len(blow.plan) for blow in result.blows), default=0)
    if result.blows:
        found.append(Line(f"{'fault':<{width}}  recovered by     ms until all trained again", "bold"))
    for blow in result.blows:
        if not blow.happened:
            text, style = "did not happen", "yellow"
        elif blow.recovery_ms is None:
            text, style = "NOT RECOVERED", "bold red"
        else:
            text, style = f"{blow.strategy:<12} {blow.recovery_ms:>10.0f}", "green"
        found.append(Line(f"{blow.plan:<{width}}  {text}", style))
    found += [Line(problem, "red") for problem in result.problems]
    if not result.blows:
        return found
    verdict, style = ("yes", "bold green") if result.identical else ("NO", "bold red")
    return [
        *found,
        Line(""),
        Line(f"steps redone: {result.steps_redone} of {result.steps}   committed steps lost: {result.commits_lost}"),
        Line(f"report: resilient-train report {result.options.run_dir / 'disturbed'}"),
        Line(f"bit-identical to the undisturbed run: {verdict} (seed {result.options.seed})", style),
    ]
