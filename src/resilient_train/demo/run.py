"""Trains the same small GPT twice, undisturbed and with processes killed, and says whether the bits are the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import msgspec

from resilient_train.child_job import LAUNCHER_LOG, check_unused, launched, log_tail
from resilient_train.demo.plot import LEGEND, draw
from resilient_train.errors import ConfigError
from resilient_train.events import Event
from resilient_train.faults import Injection, parse_plan
from resilient_train.observe.report import Line, recovery_as_dict, recovery_lines
from resilient_train.observe.sinks import EVENTS_FILE, read_events
from resilient_train.observe.timeline import RecoveryOutcome, Run, read_run
from resilient_train.observe.trace import TRACE_FILE, write_trace

JOB = "resilient_train.demo.job"
_POLL_S = 0.1

Progress = Callable[[str, int, int, list[str]], None]
"""Called several times a second: name of the run, steps done, steps in all, news since the last call."""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. Raises ConfigError for a plan that cannot happen in this run, or a directory in use."""

    run_dir: Path
    steps: int = 60
    ranks: int = 4
    faults: str = ""
    """Empty: one rank in mid-step after a third of the steps, and rank 0 in its update after two thirds."""

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"--ranks {self.ranks}: with fewer than 2 there is no replica to recover from")
        if self.steps < 6:
            raise ConfigError(f"--steps {self.steps}: needs at least 6, to have faults in the middle")
        for clause in self.plan():
            if clause.rank >= self.ranks or clause.step >= self.steps:
                bounds = f"{self.ranks} ranks and {self.steps} steps"
                raise ConfigError(f"fault plan: {clause.describe()!r} cannot happen in a run of {bounds}")
        check_unused(self.run_dir)

    def plan(self) -> tuple[Injection, ...]:
        """The faults of the disturbed run."""
        return parse_plan(self.faults or self.default_faults())

    def default_faults(self) -> str:
        """The plan where none was given."""
        victim = min(2, self.ranks - 1)
        in_step = f"kill rank={victim} step={self.steps // 3} phase=COMPUTE at=backward"
        return f"{in_step}; kill rank=0 step={2 * self.steps // 3} phase=UPDATING"


class EndedRun(msgspec.Struct, frozen=True):
    """One of the two runs. ``losses`` is rank -> step -> loss, of the last time that the step ran."""

    name: str
    run_dir: Path
    exit_code: int | None
    """None: it was killed, for it took too long."""
    seconds: float
    story: Run
    losses: dict[int, dict[int, float]]

    @property
    def digest(self) -> str | None:
        """Digest of the parameters; None unless every rank reached the end with the same."""
        return self.story.digest if self.exit_code == 0 else None


class RunComparison(msgspec.Struct, frozen=True):
    """Both runs, and what is wrong with them (nothing, one hopes)."""

    options: DemoOptions
    expected: EndedRun
    disturbed: EndedRun | None
    problems: list[str]

    @property
    def identical(self) -> bool:
        """Whether both runs ended with the same parameters, bit for bit."""
        digest = self.expected.digest
        return digest is not None and self.disturbed is not None and self.disturbed.digest == digest

    @property
    def rank_state_identical(self) -> bool:
        """Whether what is each rank's own (random numbers, place in the data) ended the same in both runs."""
        mine = self.expected.story.rank_digests
        return bool(mine) and self.disturbed is not None and self.disturbed.story.rank_digests == mine

    @property
    def good(self) -> bool:
        """Identical, and every fault of the plan happened and was recovered from."""
        return self.identical and not self.problems


def compare(options: DemoOptions, progress: Progress) -> RunComparison:
    """Runs the job twice, one after the other. Raises OSError if the launcher can't be started."""
    expected = _train(options, "undisturbed", "", progress)
    if expected.digest is None:
        return RunComparison(options, expected, None, [_failure(expected)])
    faults = "; ".join(clause.describe() for clause in options.plan())
    disturbed = _train(options, "disturbed", faults, progress)
    return RunComparison(options, expected, disturbed, _problems(options, expected, disturbed))


def _train(options: DemoOptions, name: str, faults: str, progress: Progress) -> EndedRun:
    run_dir = (options.run_dir / name).absolute()
    arguments = ["--nproc-per-node", str(options.ranks)]
    arguments += ["--faults", faults] if faults else []
    arguments += ["-m", JOB, "--steps", str(options.steps)]
    begin = time.monotonic()
    with launched(run_dir, arguments) as process:
        exit_code = _follow(process, name, run_dir, options.steps, progress)
    events = _events(run_dir)
    if events:
        write_trace(events, run_dir / TRACE_FILE)
    losses = {rank: read_losses(run_dir / f"loss_rank{rank}.jsonl") for rank in range(options.ranks)}
    return EndedRun(name, run_dir, exit_code, time.monotonic() - begin, read_run(events), losses)


def _follow(process: Popen[bytes], name: str, run_dir: Path, steps: int, progress: Progress) -> int | None:
    """Waits for the run and tells of its progress. None: it took too long."""
    deadline = time.monotonic() + 60 + steps
    told = 0
    while True:
        exit_code = process.poll()
        news = [text for event in _events(run_dir) if (text := _news(event))]
        done = max((_last_step(path) + 1 for path in run_dir.glob("loss_rank*.jsonl")), default=0)
        progress(name, done, steps, news[told:])
        told = len(news)
        if exit_code is not None or time.monotonic() > deadline:
            return exit_code
        time.sleep(_POLL_S)


def _news(event: Event) -> str:
    if event.kind == "injected":
        what = f"{event.detail.get('kind', 'fault')} rank {event.rank}"
        return f"{what} at step {event.step}, in {event.phase}"
    if event.kind == "fault":
        return f"fault seen: {event.detail.get('reason', 'no reason given')}"
    return "all ranks train again" if event.kind == "resumed" else ""


def _events(run_dir: Path) -> list[Event]:
    try:
        return read_events(run_dir / EVENTS_FILE)
    except FileNotFoundError:
        return []


def read_losses(path: Path) -> dict[int, float]:
    """Step -> loss of a ``loss_rank<r>.jsonl``, the last line of a step counts; torn lines are left out."""
    losses: dict[int, float] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = msgspec.json.decode(line, type=_Loss)
        except msgspec.MsgspecError:
            continue
        losses[entry.step] = entry.loss
    return losses


class _Loss(msgspec.Struct):
    step: int
    loss: float


def _last_step(path: Path) -> int:
    return max(read_losses(path), default=-1)


def _problems(options: DemoOptions, expected: EndedRun, disturbed: EndedRun) -> list[str]:
    if disturbed.digest is None:
        return [_failure(disturbed)]
    story, found = disturbed.story, []
    seen = sum(len(recovery.injected) for recovery in story.recoveries)
    if seen < len(options.plan()):
        found.append(f"{len(options.plan())} faults were planned, only {seen} of them led to a recovery")
    failed = [
        recovery
        for recovery in story.recoveries
        if recovery.outcome in (RecoveryOutcome.FAILED, RecoveryOutcome.UNFINISHED)
    ]
    found += [f"recovery {recovery.generation} is {recovery.outcome}" for recovery in failed]
    if story.commits_lost:
        found.append(f"{story.commits_lost} committed steps were lost")
    if disturbed.digest != expected.digest:
        found.append(f"parameters differ: digest {disturbed.digest}, undisturbed {expected.digest}")
    if story.rank_digests != expected.story.rank_digests:
        found.append("some rank's random numbers or place in the data differ at the end")
    return found + [f"rank {rank} saw other losses than undisturbed" for rank in _other_losses(expected, disturbed)]


def _other_losses(expected: EndedRun, disturbed: EndedRun) -> list[int]:
    """Ranks whose losses differ at a step that both runs recorded (one killed in its update never wrote that step)."""
    return [
        rank
        for rank, losses in disturbed.losses.items()
        if any(expected.losses[rank].get(step, loss) != loss for step, loss in losses.items())
    ]


def _failure(run: EndedRun) -> str:
    """Why a run has no digest, with the end of its log."""
    log = run.run_dir / LAUNCHER_LOG
    how = "took too long and was ended" if run.exit_code is None else f"ended with exit code {run.exit_code}"
    if run.exit_code == 0:
        how = "ended without a digest that all ranks agree on"
    reason = f": {run.story.end_reason}" if run.story.end_reason else ""
    return f"the {run.name} run {how}{reason}; its log {log} ends with\n{log_tail(log)}".rstrip("\n")


def as_dict(comparison: RunComparison) -> dict[str, Any]:
    """The demonstration's result as a JSON-able object; times in milliseconds unless the name says seconds."""
    disturbed = comparison.disturbed
    recoveries = disturbed.story.recoveries if disturbed else ()
    resumed = [recovery for recovery in recoveries if recovery.outcome is RecoveryOutcome.RESUMED]
    return {
        "identical": comparison.identical,
        "ok": comparison.good,
        "problems": comparison.problems,
        "faults": [clause.describe() for clause in comparison.options.plan()],
        "recovery_ms": [round(recovery.total_ms, 3) for recovery in resumed],
        "recoveries": [recovery_as_dict(recovery) for recovery in recoveries],
        "rank_state_identical": comparison.rank_state_identical,
        "steps": comparison.options.steps,
        "steps_redone": disturbed.story.steps_redone if disturbed else 0,
        "committed_steps_lost": disturbed.story.commits_lost if disturbed else 0,
        "digest": disturbed.digest if disturbed else None,
        "undisturbed_digest": comparison.expected.digest,
        "seconds": {run.name: round(run.seconds, 3) for run in (comparison.expected, disturbed) if run},
        "run_dir": str(comparison.options.run_dir.absolute()),
    }


def as_lines(comparison: RunComparison) -> list[Line]:
    """The demonstration's result for a person."""
    expected, disturbed = comparison.expected, comparison.disturbed
    found: list[Line] = []
    if disturbed:
        for recovery in disturbed.story.recoveries:
            found += [*recovery_lines(recovery), Line("")]
        rank = _complete_rank(expected, disturbed)
        faults = [clause.step for clause in comparison.options.plan()]
        curves = draw(expected.losses[rank], disturbed.losses[rank], faults, width=60, height=10)
        found += [Line(f"loss of rank {rank} by step   {LEGEND}"), *(Line(text, "cyan") for text in curves), Line("")]
        steps = f"steps redone: {disturbed.story.steps_redone} of {comparison.options.steps}"
        found.append(Line(f"{steps}   committed steps lost: {disturbed.story.commits_lost}"))
        found.append(Line(f"report and trace: resilient-train report {disturbed.run_dir}"))
    if comparison.rank_state_identical:
        found.append(Line("random numbers and place in the data identical: yes, on every rank", "green"))
    found += [Line(problem, "red") for problem in comparison.problems]
    verdict = f"yes (digest {expected.digest})" if comparison.identical else "NO"
    found.append(Line(f"parameters identical: {verdict}", "bold green" if comparison.good else "bold red"))
    return found


def _complete_rank(expected: EndedRun, disturbed: EndedRun) -> int:
    """The rank with the most losses to show: one that was never killed has them all."""
    return max(expected.losses, key=lambda rank: (len(disturbed.losses[rank]), -rank))
