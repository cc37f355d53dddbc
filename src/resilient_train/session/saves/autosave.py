"""``save_every("auto")``, or ``ATO:1``: as often as costs least, by what this job measures and its failures so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.observe.history import History, history_of
from resilient_train.session.agent_link import Link
from resilient_train.session.saves.cadence import BySeconds, BySteps, Cadence, Due, Wish
from resilient_train.session.saves.save_cost import Meter
from resilient_train.state.advisor import Advisor
from resilient_train.state.failures import MEMORY_SHARE, TRUSTED_FAILURES, AtoInfo, guess, parse_ato_info
from resilient_train.state.planner import Planner, SavePlan
from resilient_train.tft_switches import AutoSave, auto_save


class ByAdvice:
    """A Rhythm: keeps the plan of a Planner, and asks it anew once in a while."""

    strict = False

    def __init__(self, planner: Planner, event: Callable[[str, dict[str, Any]], None], before: AtoInfo | None) -> None:
        self._planner = planner
        self._event = event
        self._before = before
        self._plan: SavePlan | None = None
        self._stored_at = self._kept_at = -1

    def choose(self, commits: int, now_s: float, *, busy: bool) -> Due:  # noqa: ARG002 - a Rhythm is asked so
        if self._plan is None or self._stored_at < 0:
            self._plan = self._plan or self._planner.plan()
            self._stored_at = self._kept_at = commits - 1
        if commits - self._stored_at >= self._plan.storage_steps and not busy:
            return Due.STORAGE
        return Due.MEMORY if commits - self._kept_at >= self._plan.memory_steps else Due.NOTHING

    def chosen(self, commits: int, due: Due, now_s: float) -> None:  # noqa: ARG002 - likewise
        self._kept_at = commits
        if due is Due.STORAGE:
            self._stored_at = commits
            self._ask()

    def _ask(self) -> None:
        planner = self._planner
        step_s = planner.storage.step_s
        if self._before is not None and step_s:
            planner.storage.earlier(self._before.failure_count, self._before.total_steps * step_s)
            self._before = None
        plan, tiers = planner.plan(), planner.tiers()
        if plan == self._plan or tiers is None:
            return
        self._plan = plan
        memory, storage = tiers
        detail = {
            "memory_steps": plan.memory_steps,
            "steps": plan.storage_steps,
            "step_s": step_s,
            "memory_stall_s": memory.stall_s,
            "stall_s": storage.stall_s,
            "latency_s": storage.latency_s,
            "memory_mtbf_s": memory.mtbf_s,
            "mtbf_s": storage.mtbf_s,
            "failures": planner.memory.failures + planner.storage.failures,
            "cost": planner.cost(),
        }
        self._event("save_interval", detail)


def cadence_for(
    wish: Wish,
    link: Link,
    run_dir: Path,
    event: Callable[[str, dict[str, Any]], None],
    skip: Callable[[int, str], None],
) -> Cadence:
    """This rank's cadence; rank 0's leads. Raises ConfigError or OSError for what "auto" would learn from."""
    if link.rank:
        return Cadence(link.peers, None, None, skip)
    if wish.auto:
        planner, before = planner_of(run_dir, link.world_size)
        return Cadence(link.peers, ByAdvice(planner, event, before), Meter(planner, event), skip)
    timed = BySeconds(wish.seconds, time.monotonic()) if wish.seconds else None
    return Cadence(link.peers, timed or BySteps(wish.steps, wish.memory_steps), Meter(None, event), skip)


def planner_of(run_dir: Path, world_size: int) -> tuple[Planner, AtoInfo | None]:
    """A planner that knows the failures of this run directory so far; and what ATO's file tells, in steps.

    Raises ConfigError for a file of ATO's that is none, OSError for events that can't be read.
    """
    switched = auto_save(config.read_switches())
    trusted = switched.threshold if switched else TRUSTED_FAILURES
    history = history_of(run_dir)
    memory = _advisor(world_size, MEMORY_SHARE, trusted, history.by_memory, history)
    storage = _advisor(world_size, 1 - MEMORY_SHARE, trusted, history.by_storage, history)
    return Planner(memory, storage, restart_s=history.start_s or 0.0), _earlier(switched)


def _advisor(world_size: int, share: float, trusted: int, failures: int, history: History) -> Advisor:
    expected = guess(world_size, share=share)
    return Advisor(expected, trusted=trusted, failures=failures, exposure_s=history.trained_s)


def _earlier(switched: AutoSave | None) -> AtoInfo | None:
    path = Path(switched.path) if switched else None
    if path is None or not path.exists():  # MindSpore writes it at the first failure
        return None
    try:
        return parse_ato_info(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None
