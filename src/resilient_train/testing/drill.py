"""Runs a user's own script undisturbed, and then with faults, and says of each fault how it was recovered from.

The faults are drawn from a seed: steps over the whole run, ranks, kinds and places in turn at random. Each rank writes
a digest of each part of its state before each step: so the first step that went otherwise is known, and what differed.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resilient_train.child_job import LAUNCHER_LOG, check_unused, clean_environ, launched, log_tail
from resilient_train.errors import ConfigError
from resilient_train.events import Event
from resilient_train.faults import COST_NO_PROCESS, INJECTABLE, PLACES, TARGETS, UCE_PLACES, Injection
from resilient_train.observe.report import Line
from resilient_train.observe.sinks import EVENTS_FILE, read_events
from resilient_train.observe.timeline import Recovery, RecoveryOutcome, Run, read_run
from resilient_train.session.reading.loop_carried import LoopCarried
from resilient_train.testing.drill_comparison import Difference, DrillComparison

DEFAULT_KINDS = ("kill", "stop", "hcce", "uce")
"""Not ``loop``: it takes as long as the hang limit (``RESILIENT_HANG_TIMEOUT_S``) to be noticed."""
_EVERY_STEP = (("COMPUTE", "start"), ("COMPUTE", "forward"), ("COMPUTE", "backward"), ("BETWEEN", "start"))
_EVERY_UPDATE = tuple((phase, at) for phase in ("READY", "UPDATING", "APPLIED") for at in PLACES[phase])
UNDISTURBED, DISTURBED, AGAIN = "undisturbed", "disturbed", "undisturbed-again"
"""Runs, by the names of their directories."""
_FIRST_STEP = 2
"""What differs in the steps before the first fault is the script's own doing."""
_STEPS_MIN = 6
_SPACING = 2
_PER_FAULT_S = 180.0

Tell = Callable[[str], None]


class DrillOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to drill. Raises ConfigError for a drill that can't be."""

    command: tuple[str, ...]
    run_dir: Path
    ranks: int = 2
    faults: int = 6
    seed: int = 0
    kinds: tuple[str, ...] = DEFAULT_KINDS
    each: bool = False
    """Each fault in a run of its own, to find the one that does it."""
    limit_s: float = 3600.0
    """For the undisturbed run; the disturbed one gets three times what that one took, and a while per fault."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("drill: give the script behind --, as in: resilient-train drill -- train.py --epochs 1")
        if not self.command[0].startswith("-") and not Path(self.command[0]).is_file():
            raise ConfigError(f"drill: there is no script {self.command[0]!r}")
        if not self.limit_s > 0:
            raise ConfigError(f"--limit-s {self.limit_s:g}: the undisturbed run needs some time")
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
    problems: tuple[str, ...] = ()
    """Of the run that had this fault alone (``each``)."""


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """``problems`` is empty after a drill that lost nothing."""

    options: DrillOptions
    judged: bool = True
    """False: nothing can be said about faults (no Session, other bits each time, ...); ``problems`` says why."""
    blows: tuple[Blow, ...] = ()
    identical: bool = False
    """All that can be compared was the same in all steps of all ranks."""
    difference: Difference | None = None
    """The first difference that was found."""
    not_compared: dict[str, tuple[int, ...]] = {}
    """What differs between undisturbed runs, and on which ranks."""
    steps: int = 0
    steps_redone: int = 0
    commits_lost: int = 0
    problems: tuple[str, ...] = ()


class _Try(NamedTuple):
    """A run with faults, and what is wrong with it."""

    blows: tuple[Blow, ...]
    story: Run
    same: bool
    difference: Difference | None
    problems: list[str]


def drill(options: DrillOptions, tell: Tell) -> DrillResult:
    """Runs all that has to be run. Raises OSError if the launcher can't be started."""
    tell(f"{' '.join(options.command)}: undisturbed, {options.ranks} ranks ...")
    begin = time.monotonic()
    code, story, events = run_once(options, UNDISTURBED, "", options.limit_s)
    seconds = time.monotonic() - begin
    steps = min((event.detail.get("steps", 0) for event in events if event.kind == "session_end"), default=0)
    problem = _unfit(options, code, story, steps)
    if problem:
        return DrillResult(options=options, judged=False, steps=steps, problems=(problem,))
    clauses = plan(options, steps, updates_every_step=_updates(events) == steps)
    alone = ", each in a run of its own" if options.each else ""
    tell(f"  {steps} steps in {seconds:.0f} s; now with {_count(len(clauses), 'fault')}{alone} ...")
    judge = _Judge(options, seconds, tell)
    tries = []
    for name, faults in _runs(options, clauses):
        tries.append(judge.judge(name, faults))
        if judge.undetermined:
            break
    problems = [text for each in tries for text in each.problems]
    return DrillResult(
        options=options,
        judged=not judge.undetermined,
        blows=tuple(blow for each in tries for blow in each.blows),
        identical=all(each.same for each in tries),
        difference=next((each.difference for each in tries if each.difference), None),
        not_compared={} if judge.undetermined else judge.not_compared(),
        steps=steps,
        steps_redone=sum(each.story.steps_redone for each in tries),
        commits_lost=sum(each.story.commits_lost for each in tries),
        problems=tuple(problems),
    )


def _runs(options: DrillOptions, clauses: list[Injection]) -> list[tuple[str, list[Injection]]]:
    if not options.each:
        return [(DISTURBED, clauses)]
    alone = [msgspec.structs.replace(clause, incarnation=0) for clause in clauses]
    return [(f"fault-{number}", [clause]) for number, clause in enumerate(alone, 1)]


class _Judge:
    """Has the disturbed runs made, and compares them with the undisturbed one.

    The steps before a run's first fault are an undisturbed beginning. Where something differs behind it, the script
    runs undisturbed once more: whether the fault did it, or the script by itself, is not guessed.
    """

    def __init__(self, options: DrillOptions, seconds: float, tell: Tell) -> None:
        self._options = options
        self._seconds = seconds
        self._tell = tell
        self._comparison = DrillComparison(options.run_dir / UNDISTURBED, options.ranks)
        self._ran_again = False
        self.undetermined = False

    def judge(self, name: str, clauses: list[Injection]) -> _Try:
        """One run with these faults."""
        options, run_dir = self._options, self._options.run_dir / name
        text = "; ".join(clause.describe() for clause in clauses)
        limit_s = 3 * self._seconds + _PER_FAULT_S * len(clauses)
        code, story, events = run_once(options, name, text, limit_s)
        blows = tuple(outcome_of(clause, events, story.recoveries) for clause in clauses)
        problems = _problems(options, name, code, story, blows)
        difference, told = None, ""
        if code == 0:
            self._comparison.leave_out(run_dir, before_step=clauses[0].step)
            difference, told = self._compare(run_dir, clauses)
            kept = [LoopCarried(**each.detail).told() for each in events if each.kind == "loop_carried"]
            problems += [told, *kept[:1]] if told else []
        if options.each:
            blows = tuple(msgspec.structs.replace(blow, problems=tuple(problems)) for blow in blows)
            problems = [problem if blows[0].plan in problem else f"{blows[0].plan}: {problem}" for problem in problems]
        return _Try(blows, story, code == 0 and not told, difference, problems)

    def _compare(self, run_dir: Path, clauses: list[Injection]) -> tuple[Difference | None, str]:
        if told := self._not_deterministic():
            return None, told
        if missing := self._comparison.missing(run_dir):
            return None, f"ranks {', '.join(map(str, missing))} did not come to as many updates as undisturbed"
        difference = self._comparison.first_difference(run_dir)
        if difference is not None and not self._ran_again:
            self._ran_again = True
            self._tell("  something differs; undisturbed once more, to see whether the script does that by itself ...")
            code, _, _ = run_once(self._options, AGAIN, "", 3 * self._seconds + _PER_FAULT_S)
            if code != 0:
                return None, f"the script ended well once; run undisturbed again, it did not (exit code {code})"
            self._comparison.leave_out(self._options.run_dir / AGAIN)
            if told := self._not_deterministic():
                return None, told
            difference = self._comparison.first_difference(run_dir)
        return difference, explain(difference, clauses) if difference else ""

    def _not_deterministic(self) -> str:
        found = self._comparison.undetermined()
        self.undetermined = found is not None
        if found is None:
            return ""
        rank, name = found
        return (
            f"the script is not deterministic: {name} of rank {rank} differs between two undisturbed runs, so nothing "
            "can be said about faults. Look for generators that are not seeded, time, threads, the order of sets"
        )

    def not_compared(self) -> dict[str, tuple[int, ...]]:
        """What the script does differently each time, and on which ranks."""
        left_out = self._comparison.left_out
        names = sorted({name for theirs in left_out for name in theirs})
        return {name: tuple(rank for rank, theirs in enumerate(left_out) if name in theirs) for name in names}


def explain(difference: Difference, clauses: Sequence[Injection]) -> str:
    """The first difference as a sentence: rank, step, tensor, the fault before it, and where to look."""
    pieces, step = difference.pieces, difference.step
    more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
    before = [clause for clause in clauses if clause.step <= step]
    after = f" (the last fault before: {before[-1].describe()})" if before else ""
    what = f"{said(pieces[0])}{more} of rank {difference.rank}"
    if difference.again:
        return (
            f"step {step} did not begin again as it had begun: {what} differs{after}. What is written "
            "past torch before optimizer.step() (parameter.data, NumPy) is not put back, nor is what is not registered "
            "(docs/how-to/loops.md, State that is written before the update)"
        )
    if difference.began:
        return f"step {step} is the first that differs: it began with another {what}{after}"
    return (
        f"step {step} is the first that differs: it began as undisturbed, and ended with another {what}{after}. So it "
        "uses something that the Session does not know: a local variable that is carried from step to step, a file, "
        "the time. Register it (state=, rank_state=), or make it from step.number"
    )


def said(piece: str) -> str:
    """A piece of state for people."""
    return {
        "generator.python": "Python's random numbers",
        "generator.numpy": "NumPy's random numbers",
        "generator.torch": "torch's random numbers",
        "generator.cuda": "CUDA's random numbers",
        "loader": "place in the data",
    }.get(piece, piece)


def plan(options: DrillOptions, steps: int, *, updates_every_step: bool) -> list[Injection]:
    """The faults, by step. A killed or hung rank's next fault is meant for its replacement."""
    chance = random.Random(options.seed)
    candidates = range(_FIRST_STEP, steps - 1, _SPACING)
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


def run_once(options: DrillOptions, name: str, faults: str, limit_s: float) -> tuple[int | None, Run, list[Event]]:
    """The script once, with these faults: exit code (None: it took too long), story, events."""
    run_dir = (options.run_dir / name).absolute()
    arguments = ["--nproc-per-node", str(options.ranks), "--faults", faults, *options.command]
    environ = clean_environ(switches=True)
    environ.pop("RESILIENT_FAULTS", None)
    environ.pop("RESILIENT_RUN_DIR", None)
    environ["RESILIENT_DRILL_RECORDS"] = "1"
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


def _unfit(options: DrillOptions, code: int | None, story: Run, steps: int) -> str:
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
    hits = [e for e in events if e.kind == "injected" and is_of(clause, e)]
    if not hits:
        return Blow(clause.describe(), False, "", False, None)
    after = [recovery for recovery in recoveries if recovery.end_ns >= hits[0].time_ns]
    end = next((recovery for recovery in after if recovery.outcome is RecoveryOutcome.RESUMED), None)
    if end is None:
        return Blow(clause.describe(), True, "none", False, None)
    hung = any(e.kind == "hung" and e.time_ns >= hits[0].time_ns and clause.rank in e.detail["ranks"] for e in events)
    lost = any(clause.rank in recovery.lost for recovery in after[: after.index(end) + 1])
    strategy = ("HANG, ARF" if hung and clause.kind in ("stop", "loop") else "ARF") if lost else clause.kind.upper()
    return Blow(clause.describe(), True, strategy, True, (end.end_ns - hits[0].time_ns) / 1e6)


def is_of(clause: Injection, event: Event) -> bool:
    """Whether this is the event of that fault."""
    found = (event.rank, event.incarnation, event.step, event.phase, event.detail.get("at"))
    return found == (clause.rank, clause.incarnation, clause.step, clause.phase, clause.at)


def _problems(options: DrillOptions, name: str, code: int | None, story: Run, blows: Sequence[Blow]) -> list[str]:
    log = options.run_dir / name / LAUNCHER_LOG
    found = [f"{blow.plan}: not recovered" for blow in blows if blow.happened and not blow.recovered]
    if code is None:
        return [*found, f"the disturbed run took too long and was ended; its log {log} ends with\n{log_tail(log)}"]
    if code:
        return [*found, f"the disturbed run ended with exit code {code}; its log {log} ends with\n{log_tail(log)}"]
    if not any(blow.happened for blow in blows):
        found.append("not one of the planned faults happened: the script leaves no room for them")
    if story.commits_lost:
        found.append(f"{story.commits_lost} committed steps were lost")
    return found


def as_dict(result: DrillResult) -> dict[str, Any]:
    """The result as a JSON-able object; times in milliseconds."""
    return {
        "ok": not result.problems,
        "identical": result.identical,
        "problems": list(result.problems),
        "difference": msgspec.to_builtins(result.difference),
        "not_compared": {name: list(ranks) for name, ranks in result.not_compared.items()},
        "faults": msgspec.to_builtins(result.blows),
        "seed": result.options.seed,
        "ranks": result.options.ranks,
        "steps": result.steps,
        "steps_redone": result.steps_redone,
        "committed_steps_lost": result.commits_lost,
        "run_dir": str(result.options.run_dir.absolute()),
    }


def as_lines(result: DrillResult) -> list[Line]:
    """The result for a person. The last line is the verdict: "yes" where there are no problems, and only there."""
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
        found.append(Line(f"{blow.plan:<{width}}  {text}{'   NOT THE SAME' if blow.problems else ''}", style))
    found += [Line(problem, "red") for problem in result.problems]
    found += [Line(text, "yellow") for text in _not_compared(result)]
    if not result.judged:
        return [*found, Line("recovers bit for bit: not known", "bold red")]
    run = "fault-<n>" if result.options.each else DISTURBED
    found += [
        Line(""),
        Line(f"steps redone: {result.steps_redone} of {result.steps}   committed steps lost: {result.commits_lost}"),
        Line(f"report: resilient-train report {result.options.run_dir / run}"),
    ]
    happened = sum(blow.happened for blow in result.blows)
    of = f"{_count(happened, 'fault')}, seed {result.options.seed}"
    if not result.problems:
        return [*found, Line(f"recovers bit for bit: yes ({of})", "bold green")]
    if result.difference is not None and not result.options.each and happened > 1:
        found.append(Line("which fault does it: the same command with --each"))
    return [*found, Line(f"recovers bit for bit: NO ({of})", "bold red")]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _not_compared(result: DrillResult) -> list[str]:
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for piece, ranks in result.not_compared.items():
        by_ranks.setdefault(ranks, []).append(said(piece))
    return [
        f"not compared: {', '.join(pieces)} of rank {', '.join(map(str, ranks))}: they differ between two undisturbed "
        "runs (the script does not seed them, or they depend on time)"
        for ranks, pieces in by_ranks.items()
    ]
