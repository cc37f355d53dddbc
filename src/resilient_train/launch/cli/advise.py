"""How often to save, and what the present interval costs: ``resilient-train advise``."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec

from resilient_train import config
from resilient_train.errors import ConfigError, ResilientError
from resilient_train.launch.cli import asking
from resilient_train.observe.history import History, LatestStep, history_of
from resilient_train.observe.report import Line
from resilient_train.observe.sinks import EVENTS_FILE
from resilient_train.protocol.messages import Query
from resilient_train.state.advisor import behind
from resilient_train.state.failures import DEVICE_MTBF_S, TRUSTED_FAILURES, FailureRate, guess, parse_ato_info
from resilient_train.state.interval import Tier, best_steps, fewest_steps, overhead
from resilient_train.state.nested import Nested, nested_overhead, nested_steps
from resilient_train.tft_switches import auto_save

_HOUR_S = 3600.0
_DAY_S = 86_400.0
_GOOD_ENOUGH = 1.05
"""A present interval that costs less than this, against the best one, is not worth a change."""


class AdviseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command was given; None: not given. The names are those of its flags."""

    run_dir: Path | None = None
    stall_s: float | None = None
    step_s: float | None = None
    restart_s: float | None = None
    latency_s: float | None = None
    in_flight: int = 1
    detection_s: float = 0.0
    devices: int | None = None
    mtbf_hours: float | None = None
    share: float = 1.0
    failures: int | None = None
    hours: float | None = None
    ato_path: Path | None = None
    present_steps: int | None = None
    memory_stall_s: float | None = None
    memory_share: float = 0.9


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """What the advice is computed from, and in ``notes`` where it came from, for people."""

    rate: FailureRate
    step_s: float
    restart_s: float
    history: History | None
    notes: tuple[tuple[str, str], ...]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals in steps; costs as fractions of the training time, infinite where the training would never end."""

    basis: Basis
    storage: Tier
    """The checkpoint that is advised on; with ``memory``, the one that the memory checkpoint does not do for."""
    steps: int
    cost: float
    memory_steps: int | None = None
    present_steps: int | None = None
    kept_steps: int | None = None
    """How often the present interval saves in fact: a multiple of it where storage is slower."""
    present_cost: float | None = None
    """Of a checkpoint of one kind, for all failures."""


def advise(options: AdviseOptions) -> Advice:
    """The advice. Raises ConfigError for what is missing, or can't be."""
    history = _history(options.run_dir) if options.run_dir else None
    by_run = options.stall_s is None
    if by_run:
        options = _as_measured(options, history)
    if options.stall_s is None:
        raise ConfigError(
            "advise: give --stall-s: the training time that one save costs, in seconds; or --run-dir of a run that has "
            "saved (save_every) and measured it"
        )
    if options.present_steps is not None and options.present_steps < 1:
        raise ConfigError(f"advise: --present-steps must be 1 or more, not {options.present_steps}")
    basis = _basis(options, history, by_run=by_run)
    whole = Tier(
        stall_s=options.stall_s,
        mtbf_s=basis.rate.mtbf_s,
        restart_s=basis.restart_s,
        latency_s=options.latency_s or 0.0,
        in_flight=options.in_flight,
        detection_s=options.detection_s,
    )
    present: dict[str, Any] = {"present_steps": options.present_steps}
    if options.present_steps is not None:
        present["kept_steps"] = _kept(options.present_steps, whole, basis.step_s)
        present["present_cost"] = overhead(present["kept_steps"] * basis.step_s, whole)
    if options.memory_stall_s is None:
        steps = best_steps(whole, basis.step_s)
        cost = overhead(steps * basis.step_s, whole)
        return Advice(basis=basis, storage=whole, steps=steps, cost=cost, **present)
    if not 0 < options.memory_share < 1:
        raise ConfigError(f"advise: --memory-share must be above 0 and below 1, not {options.memory_share}")
    memory = Tier(
        stall_s=options.memory_stall_s,
        mtbf_s=basis.rate.mtbf_s / options.memory_share,
        restart_s=basis.restart_s,
        detection_s=options.detection_s,
    )
    storage = msgspec.structs.replace(whole, mtbf_s=basis.rate.mtbf_s / (1 - options.memory_share))
    often, seldom = nested_steps(memory, storage, basis.step_s)
    cost = nested_overhead(Nested(often * basis.step_s, seldom // often), memory, storage)
    return Advice(basis=basis, storage=storage, steps=seldom, memory_steps=often, cost=cost, **present)


def _as_measured(options: AdviseOptions, history: History | None) -> AdviseOptions:
    """With what the run's saves cost, as far as no flag says it."""
    if history is None or history.stall_s is None:
        return options
    memory_stall_s = history.memory_stall_s if options.memory_stall_s is None else options.memory_stall_s
    latency_s = options.latency_s
    if latency_s is None and history.latency_s is not None:
        latency_s = behind(history.stall_s, history.latency_s)
    return msgspec.structs.replace(options, stall_s=history.stall_s, memory_stall_s=memory_stall_s, latency_s=latency_s)


def _kept(present_steps: int, tier: Tier, step_s: float) -> int:
    """A save that is due while storage is busy is left out, so the next is a whole interval later."""
    return present_steps * fewest_steps(tier.carried_s, present_steps * step_s)


def _basis(options: AdviseOptions, history: History | None, *, by_run: bool) -> Basis:
    told = history or History()
    step_s = told.step_s if options.step_s is None else options.step_s
    if step_s is None:
        missing = f"{options.run_dir} does not say how long a step takes: " if options.run_dir else ""
        raise ConfigError(f"advise: {missing}give --step-s")
    devices = told.world_size if options.devices is None else options.devices
    if devices is None:
        raise ConfigError("advise: give --devices (how many the job trains on), or --run-dir of a run on them")
    mtbf_s = DEVICE_MTBF_S if options.mtbf_hours is None else options.mtbf_hours * _HOUR_S
    expected = guess(devices, mtbf_s, options.share)
    failures, during_s, trusted, seen = _seen(options, told, step_s)
    rate = expected.seen(failures, during_s, trusted)
    dropped = rate.failures == failures
    weight = "what was seen alone" if dropped else f"what is expected counts like {expected.failures:g} failures seen"
    restart_s = (told.start_s or 0.0) if options.restart_s is None else options.restart_s
    notes = [
        ("expected", _about_guess(options, devices, expected)),
        *seen,
        ("so", f"one failure that needs the checkpoint in {_span(rate.mtbf_s)} ({weight})"),
        ("measured", f"{_about_saves(options, by_run=by_run)}, a step takes {_span(step_s)}"),
        ("restart", _about_restart(options, told)),
    ]
    return Basis(rate=rate, step_s=step_s, restart_s=restart_s, history=history, notes=tuple(notes))


def _about_saves(options: AdviseOptions, *, by_run: bool) -> str:
    memory = "" if options.memory_stall_s is None else f", one in memory {_span(options.memory_stall_s)}"
    source = " (medians of the run's own saves)" if by_run else ""
    latency = f"; it is on storage {_span(options.latency_s)} later" if options.latency_s else ""
    return f"a save costs {_span(options.stall_s or 0.0)} of training{memory}{latency}{source}"


def _about_guess(options: AdviseOptions, devices: int, expected: FailureRate) -> str:
    hours = DEVICE_MTBF_S / _HOUR_S if options.mtbf_hours is None else options.mtbf_hours
    source = "supposed, see --mtbf-hours" if options.mtbf_hours is None else "--mtbf-hours"
    each = f"{devices:,} devices, each fails once in {hours:,.6g} h ({source})"
    share = f", {options.share:.3g} of which need a checkpoint (--share)" if options.share != 1 else ""
    return f"one failure in {_span(expected.mtbf_s)}: {each}{share}"


def _about_restart(options: AdviseOptions, told: History) -> str:
    if options.restart_s is not None:
        return _span(options.restart_s)
    if told.start_s is not None:
        return f"{_span(told.start_s)}, as the run took from its launch to its first step (better: --restart-s)"
    return "left out of the costs (--restart-s); no interval changes it"


def _seen(options: AdviseOptions, told: History, step_s: float) -> tuple[int, float, int, list[tuple[str, str]]]:
    """Failures that needed a checkpoint, in how much time, from how many on they alone count; and that in words."""
    if (options.failures is None) != (options.hours is None):
        raise ConfigError("advise: give both of --failures and --hours, or neither")
    failures, during_s, notes = 0, 0.0, []
    if options.failures is not None and options.hours is not None:
        failures, during_s = options.failures, options.hours * _HOUR_S
        notes.append(("seen", f"{failures} in {_span(during_s)} (--failures, --hours)"))
    elif options.run_dir:
        failures, during_s = told.ended + told.gone_back, told.trained_s
        notes.append(("seen", f"{options.run_dir}: {_told(told)}"))
    path, trusted = _ato(options)
    if path:
        try:
            info = parse_ato_info(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(f"advise: {path} can't be read: {error.strerror or error}") from None
        failures, during_s = failures + info.failure_count, during_s + info.total_steps * step_s
        notes.append(("seen", f"{path}: {info.failure_count} in {info.total_steps} steps"))
    return failures, during_s, trusted, notes


def _ato(options: AdviseOptions) -> tuple[Path | None, int]:
    """The file of ATO, if there is one, and its threshold: a flag's, or that of ``MS_ENABLE_TFT``."""
    switched = auto_save(config.read_switches())
    trusted = switched.threshold if switched else TRUSTED_FAILURES
    if options.ato_path or switched is None:
        return options.ato_path, trusted
    path = Path(switched.path)
    return path if path.exists() else None, trusted  # MindSpore writes it at the first failure


def _told(history: History) -> str:
    count = history.ended + history.gone_back + history.repaired
    text = f"{count} {'fault' if count == 1 else 'faults'} in {_span(history.trained_s)} of training"
    if count:
        text += f": {history.repaired} repaired without a checkpoint, {history.ended} ended the run"
        text += f", after {history.gone_back} all ranks went back to what was saved" if history.gone_back else ""
    return text + (f" ({history.injected} injected, not counted)" if history.injected else "")


def _history(run_dir: Path) -> History:
    """Of all runs in the directory. Raises ConfigError if there is none."""
    newest = run_dir / EVENTS_FILE
    if not newest.is_file():
        raise ConfigError(f"advise: {run_dir} has no {EVENTS_FILE}: give the run directory of a job (its --run-dir)")
    running = _standing(run_dir)
    try:
        return history_of(run_dir, running)
    except OSError as error:
        raise ConfigError(f"advise: {error.filename} can't be read: {error.strerror or error}") from None


def _standing(run_dir: Path) -> LatestStep | None:
    """Where the job is, if it runs now: events alone do not tell, in hours without a fault there are none."""
    with contextlib.suppress(ResilientError):  # nothing runs there, or has no time: then the events are all there is
        ranks = asking.ask(run_dir, Query()).status.get("ranks")
        rows = [row for row in ranks if isinstance(row, dict)] if isinstance(ranks, list) else []
        steps = [step for row in rows if isinstance(step := row.get("step"), int)]
        return LatestStep(time.time_ns(), max(steps, default=-1))
    return None


def as_dict(advice: Advice) -> dict[str, Any]:
    """The advice as a JSON-able object; times in seconds, a cost that is infinite None."""
    basis, storage = advice.basis, advice.storage
    result: dict[str, Any] = {
        "steps": advice.steps,
        "seconds": advice.steps * basis.step_s,
        "cost": advice.cost,
        "memory_steps": advice.memory_steps,
        "present_steps": advice.present_steps,
        "kept_steps": advice.kept_steps,
        "present_cost": advice.present_cost,
        "mtbf_s": basis.rate.mtbf_s,
        "stall_s": storage.stall_s,
        "step_s": basis.step_s,
        "restart_s": basis.restart_s,
        "latency_s": storage.latency_s,
        "in_flight": storage.in_flight,
        "detection_s": storage.detection_s,
        "notes": [f"{what}: {text}" for what, text in basis.notes],
        "history": msgspec.to_builtins(basis.history),
    }
    return result


def as_lines(advice: Advice) -> list[Line]:
    """The advice for a person."""
    step_s = advice.basis.step_s
    found = [Line(f"{what:<10}{text}") for what, text in advice.basis.notes]
    best = _every(advice.steps, step_s)
    if advice.memory_steps is not None:
        best = f"in memory {_every(advice.memory_steps, step_s)}, to storage {best}"
    found.append(Line(f"{'best':<10}{best}: saves and failures cost {_percent(advice.cost)} of training time", "bold"))
    if advice.present_steps is not None and advice.present_cost is not None:
        alone = "to storage alone, " if advice.memory_steps is not None else ""
        present = alone + _every(advice.present_steps, step_s)
        if advice.kept_steps != advice.present_steps:
            present += f", of which storage carries one in {(advice.kept_steps or 0) // advice.present_steps} only"
        found.append(_about_present(advice.cost, advice.present_cost, present))
    return found


def _about_present(best: float, cost: float, present: str) -> Line:
    if cost <= best * _GOOD_ENOUGH:
        return Line(f"{'present':<10}{present}: {_percent(cost)}, no reason to change it", "green")
    more_s = (cost - best) * _DAY_S
    more = f", {_span(more_s)} more for each day of training" if more_s < 100 * _DAY_S else ": little is ever finished"
    return Line(f"{'present':<10}{present}: {_percent(cost)}{more}", "yellow")


def _every(steps: int, step_s: float) -> str:
    return f"every {'step' if steps == 1 else f'{steps:,} steps'} ({_span(steps * step_s)})"


def _percent(cost: float) -> str:
    return f"{100 * cost:.3g} %" if cost < 1000 else "all"


def _span(seconds: float) -> str:
    """A time for people: two units at most."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < _HOUR_S:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 100 * _HOUR_S:
        return f"{int(seconds // _HOUR_S)} h {int(seconds % _HOUR_S // 60)} min"
    return f"{seconds / _HOUR_S:,.0f} h"
