"""From the ranks' pages to what the agent does about a straggler, without processes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from resilient_train._native import Board, Page
from resilient_train.config import Settings, check_straggler
from resilient_train.errors import ConfigError
from resilient_train.launch.agent import straggler_watch
from resilient_train.launch.agent.straggler_watch import StragglerWatch
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.holders import Holders
from resilient_train.protocol.job import Stage
from resilient_train.protocol.policy import Policy
from resilient_train.tft_switches import Switches

RANKS = 2
SLOW_AT = 100
PHASE_APPLIED, PHASE_READY, PHASE_UPDATING = 0, 2, 3


class Agent:
    """A watch, and the pages of two ranks that it looks at."""

    def __init__(self, on_straggler: str = "report", policy: Policy | None = None) -> None:
        self.board = Board.create(RANKS)
        self.pages = [Page(self.board, rank) for rank in range(RANKS)]
        self.job = Controller(RANKS, policy).job
        self.job.stage = Stage.RUNNING
        self.job.holders = Holders(((0, 1),))
        self.watch = StragglerWatch(self.board, self.job, Settings(on_straggler=on_straggler))
        self.commits = 0
        self.told: list[tuple[str, int, dict[str, Any]]] = []
        self.fenced: list[tuple[list[int], str]] = []

    def fence(self, ranks: Collection[int], reason: str) -> None:
        self.fenced.append((list(ranks), reason))

    def tell_slower(self, kind: str, rank: int, step: int, detail: dict[str, Any]) -> None:
        assert detail["since"] <= step
        self.told.append((kind, rank, detail))

    def window(self, *times_ms: int) -> None:
        """All ranks go through one; a rank that takes 0 ms has been cut in it."""
        self.commits += 1
        for rank, duration_ms in enumerate(times_ms):
            self.pages[rank].restart()
            if duration_ms:
                self.pages[rank].add_computed(duration_ms * 1_000_000)
            self.pages[rank].arrive(self.commits - 1, PHASE_READY, self.commits - 1)
        for page in self.pages:
            assert page.cross(self.commits - 1, PHASE_READY, PHASE_UPDATING, self.commits - 1, 0)
            page.begin(self.commits, PHASE_APPLIED, self.commits - 1)

    def windows(self, count: int, *times_ms: int, each: int = 7) -> None:
        for number in range(count):
            self.window(*times_ms)
            if number % each == 0:
                self.watch.look(self)
        self.watch.look(self)


def slowed(agent: Agent) -> Agent:
    agent.windows(SLOW_AT, 50, 50)
    agent.windows(40, 50, 80)
    return agent


def test_a_straggler_is_told() -> None:
    agent = slowed(Agent())
    ((kind, rank, detail),) = agent.told
    assert (kind, rank, detail["since"]) == ("straggler", 1, SLOW_AT)
    assert detail["ratio"] == pytest.approx(1.6, abs=0.05)
    assert (detail["compute_ms"], detail["before_ms"]) == (pytest.approx(80, rel=0.05), pytest.approx(50, rel=0.05))
    assert agent.fenced == []
    (shown,) = agent.watch.status()["stragglers"]
    assert (shown["rank"], shown["since"]) == (1, SLOW_AT)
    agent.windows(140, 50, 50)
    assert [kind for kind, _, _ in agent.told] == ["straggler", "straggler_over"]
    assert agent.watch.status() == {"stragglers": []}
    assert agent.watch.usual()["1"]["ratio"] == pytest.approx(1, abs=0.05)


def test_windows_between_two_looks_are_not_lost() -> None:
    agent = Agent()
    agent.watch.look(agent)
    assert agent.watch.usual() == {}
    agent.windows(SLOW_AT, 50, 50, each=1000)
    assert agent.watch.usual() != {}, "the board keeps as many"


def test_windows_that_were_cut_do_not_count() -> None:
    agent = Agent()
    agent.windows(SLOW_AT, 50, 50)
    for _ in range(60):
        agent.window(50, 0)
        agent.window(0, 500)
    agent.pages[1].excuse()
    agent.watch.look(agent)
    assert agent.told == []


def test_a_window_is_excused() -> None:
    agent = Agent()
    agent.pages[0].add_computed(5)
    agent.pages[0].excuse()
    for page in agent.pages:
        page.arrive(0, PHASE_READY, 0)
    for rank, page in enumerate(agent.pages):
        page.cross(0, PHASE_READY, PHASE_UPDATING, 0, 0)
        page.begin(1, PHASE_APPLIED, 0)
        assert agent.board.computed(rank, 0) == [(1, 0, 0)], "excused; or no body was told of"


def test_the_first_windows_behind_a_recovery_do_not_count() -> None:
    agent = Agent()
    agent.windows(SLOW_AT, 50, 50)
    for _ in range(12):
        agent.job.generation += 1
        agent.watch.look(agent)
        agent.windows(5, 50, 900)
        agent.windows(3, 50, 50)
    assert agent.told == []


def test_where_every_window_is_computed_twice_the_others_are_looked_at() -> None:
    """Each of these is a generation of its own, in which nothing has happened to anybody."""
    agent = Agent()
    agent.watch.look(agent)
    agent.job.verifying = True
    for times_ms in [(50, 50)] * (SLOW_AT // 3) + [(50, 80)] * 30:
        agent.job.generation += 1
        agent.windows(3, *times_ms)
    assert [(kind, rank) for kind, rank, _ in agent.told] == [("straggler", 1)]


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.RECOVERING, Stage.PAUSED, Stage.LEAVING])
def test_nothing_is_looked_at_elsewhere(stage: Stage) -> None:
    agent = Agent()
    agent.job.stage = stage
    assert slowed(agent).told == []


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler_watch, "_WORTH_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_it_is_replaced_once() -> None:
    agent = slowed(Agent("replace"))
    ((ranks, reason),) = agent.fenced
    assert ranks == [1]
    assert reason.startswith("computes 1.6")
    assert reason.endswith(f"times slower since step {SLOW_AT}")
    agent.job.generation += 1
    agent.windows(140, 50, 50)
    agent.windows(40, 50, 80)
    assert [kind for kind, _, _ in agent.told] == ["straggler", "straggler_over", "straggler"]
    assert len(agent.fenced) == 1, "its device is as slow as it was"


@pytest.mark.usefixtures("at_once")
def test_a_replacement_never_costs_the_job() -> None:
    for policy in (Policy(replace=False), Policy(max_restarts=0)):
        assert slowed(Agent("replace", policy)).fenced == [], "it would not be replaced"
    agent = Agent("replace")
    agent.job.holders = Holders(((0,), (1,)))
    assert slowed(agent).fenced == [], "nobody else has its state"
    agent = Agent("replace")
    agent.job.finished.add(0)
    assert slowed(agent).fenced == [], "the loop is over"


def test_who_was_replaced_anyway_is_not_replaced() -> None:
    agent = slowed(Agent("replace"))
    agent.job.incarnations[1] += 1
    agent.job.generation += 1
    agent.watch._told_s = dict.fromkeys(agent.watch._told_s, 0.0)
    agent.windows(1, 50, 80)
    assert agent.fenced == []
    agent.job.incarnations[1] -= 1
    agent.windows(1, 50, 80)
    assert agent.fenced, "only for that"


def test_what_may_be_over_before_is_not_replaced() -> None:
    agent = slowed(Agent("replace"))
    assert agent.told
    assert agent.fenced == [], "all of this took less time than a replacement"


def test_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"RESILIENT_ON_STRAGGLER='replac': unknown.*did you mean 'replace'"):
        Settings(on_straggler="replac")
    check_straggler(Settings(on_straggler="replace"), Switches(arf=True))
    check_straggler(Settings(), Switches())
    with pytest.raises(ConfigError, match="ARF, which is off"):
        check_straggler(Settings(on_straggler="replace"), Switches(ttp=True))
