"""The hang watch of a MindSpore job: who is given up, when, and for whom it waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train.config import Settings
from resilient_train.integrations.mindio.controller import MindioController, MindioStage
from resilient_train.integrations.mindio.frames import Did, ReplicaGroup, ReportState
from resilient_train.launch.agent.mindspore_hang_watch import LOOK_S, MindSporeHangWatch
from resilient_train.launch.agent.process_activity import Used, Work, read_used
from resilient_train.protocol.hang import RunState, Stall, Suspicion

RANKS = 3
STEP_S = 0.5


class Job:
    """A job of three ranks that hold the same, in a time of its own. It is what the watch is to keep."""

    def __init__(self, *, updates: int = 20, **settings: float) -> None:
        self.controller = MindioController(RANKS)
        for rank in range(RANKS):
            self.controller.hello(rank)
        for rank in range(RANKS):
            self.controller.replicas(rank, (ReplicaGroup(tuple(range(RANKS)), RANKS),))
        self.states = [RunState.RUNNING] * RANKS
        self.working: set[int] = set()
        self.now_s = 0.0
        self.reads = 0
        """Of ``/proc``."""
        self.given_up: list[tuple[list[int], str]] = []
        self.steps_given_up: list[str] = []
        self.told: list[Suspicion] = []
        self.paused: list[list[int]] = []
        running: Any = {
            rank: SimpleNamespace(pid=os.getpid(), rank=rank, state=lambda rank=rank: self.states[rank])
            for rank in range(RANKS)
        }
        for process in running.values():
            process.signal = lambda number: None
            process.pid = 1 << 30 | process.rank
        running[-1] = SimpleNamespace(pid=1 << 29, state=lambda: RunState.STOPPED)  # MindSpore's scheduler
        self.watch = MindSporeHangWatch(
            self.controller,
            running,
            RANKS,
            Settings(**settings),
            clock=lambda: int(self.now_s * 1e9),
            work=Work(60_000, self._used),
        )
        for step in range(1, updates + 1):
            self.passes(STEP_S)
            self.update(step, *range(RANKS))

    def _used(self, pids: Collection[int]) -> dict[int, Used]:
        assert {pid >> 30 for pid in pids} == {1}, "the scheduler is no rank"
        self.reads += 1
        return {pid: Used(int(self.now_s * 1000) * (pid & 3 in self.working), 0, in_storage=False) for pid in pids}

    def update(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            self.controller.status(rank, step, updating=False)

    def passes(self, seconds: float) -> None:
        look_s = LOOK_S if seconds < 100 else 9 * LOOK_S
        for _ in range(round(seconds / look_s)):
            self.now_s += look_s
            self.watch.look(self)

    def stands(self, *ranks: int) -> None:
        """They answer what is asked of them."""
        order = {MindioStage.LOCKING: "lock", MindioStage.STOPPING: "stop", MindioStage.CLEANING: "clean"}[
            self.controller.stage
        ]
        for rank in ranks:
            self.controller.did(rank, Did(self.controller.round, order, 0, self.controller.seats[rank].step))

    # -- the keeper

    def give_up(self, ranks: Collection[int], reason: str) -> None:
        self.given_up.append(([*ranks], reason))

    def give_up_step(self, reason: str) -> None:
        self.steps_given_up.append(reason)
        self.controller.stalled(reason)

    def tell(self, finding: Stall, detail: dict[str, object]) -> None:
        self.told.append(finding.verdict)

    def tell_pause(self, paused_s: float, stopped: Collection[int]) -> None:
        self.paused.append([*stopped])


def test_a_job_that_trains_is_left_alone() -> None:
    job = Job(updates=100)
    assert (job.given_up, job.steps_given_up, job.told) == ([], [], [])
    assert job.reads == 0
    job.passes(99)
    assert 50 < job.reads < 100, "about once a second"


def test_a_step_that_no_rank_ends_is_given_up_after_half_an_hour() -> None:
    job = Job()
    job.passes(29 * 60)
    assert job.steps_given_up == []
    job.passes(2 * 60)
    (reason,) = job.steps_given_up
    assert "all ranks is between updates 20 and 21, and none of them goes on" in reason
    assert job.controller.stage is MindioStage.LOCKING


@pytest.mark.parametrize("working", [{0}, {0, 1, 2}])
def test_it_is_not_while_one_compiles(working: set[int]) -> None:
    job = Job()
    job.working = working
    job.passes(3 * 3600)
    assert (job.steps_given_up, job.told) == ([], [])
    job.working = set()
    job.passes(62 * 60)
    assert len(job.steps_given_up) == 1, "and its end is seen"


def test_nothing_is_looked_at_before_all_have_made_an_update() -> None:
    """Graphs are compiled, and there is nothing to go on from behind a loss."""
    job = Job(updates=0)
    job.states[1] = RunState.STOPPED
    job.passes(3600)
    job.update(1, 0, 1)
    job.passes(3600)
    assert (job.given_up, job.steps_given_up, job.told) == ([], [], [])


def test_nothing_is_looked_at_behind_the_end_of_one() -> None:
    """The others evaluate, or save what they have learnt."""
    job = Job()
    job.controller.bye(0)
    job.states[1] = RunState.STOPPED
    job.passes(3600)
    assert (job.given_up, job.steps_given_up, job.told) == ([], [], [])


@pytest.mark.parametrize("pauses", [False, True], ids=["", "on the way to a pause"])
def test_who_is_behind_is_given_up_after_ten_minutes(*, pauses: bool) -> None:
    job, last = Job(), 20
    if pauses:
        job.controller.pause()
        for last in (21, 22, 23, 24):
            job.passes(STEP_S)
            job.update(last, *range(RANKS))
    job.controller.status(1, last, updating=True)
    job.update(last + 1, 0, 2)
    job.passes(9 * 60)
    assert job.given_up == []
    assert job.told == [Suspicion.BEHIND, Suspicion.SUSPECT]
    job.passes(2 * 60)
    ((ranks, reason),) = job.given_up
    assert ranks == [1]
    assert f"it is writing update {last + 1}; the others wait for it" in reason


@pytest.mark.parametrize(("working", "is_given_up"), [(1, False), (0, True)], ids=["it saves", "another works"])
def test_who_is_behind_and_works_takes_its_time(working: int, *, is_given_up: bool) -> None:
    job = Job()
    job.update(21, 0, 2)
    job.working = {working}
    job.passes(3600)
    assert bool(job.given_up) == is_given_up


def test_the_first_steps_behind_a_recovery_have_the_longer_limit() -> None:
    """A new process compiles."""
    job = Job()
    job.controller.round += 1
    job.update(21, 0, 2)
    job.passes(29 * 60)
    assert job.given_up == []


def test_a_users_own_limit() -> None:
    job = Job(hang_timeout_s=5)
    job.update(21, 0, 2)
    job.passes(4)
    assert job.given_up == []
    job.passes(2)
    assert [ranks for ranks, _ in job.given_up] == [[1]]


def test_a_stopped_process_is_given_up_within_two_usual_steps() -> None:
    job = Job()
    job.states[1] = RunState.STOPPED
    job.passes(STEP_S)
    assert job.given_up == []
    job.passes(2 * STEP_S)
    ((ranks, reason),) = job.given_up
    assert ranks == [1]
    assert "SIGSTOP" in reason


def test_where_all_are_stopped_nobody_is() -> None:
    job = Job()
    job.states = [RunState.STOPPED] * RANKS
    job.passes(3600)
    assert (job.given_up, job.steps_given_up) == ([], [])
    assert job.paused[0] == [0, 1, 2]
    job.states = [RunState.RUNNING] * RANKS
    job.passes(20 * 60)
    assert job.steps_given_up == [], "that time does not count"


def test_a_debugger_is_waited_for() -> None:
    job = Job()
    job.update(21, 0, 2)
    job.states[1] = RunState.TRACED
    job.passes(3600)
    assert job.given_up == []


def test_who_does_not_leave_its_step_is_given_up() -> None:
    """It was not seen before: all had stood in the same place."""
    job = Job()
    job.give_up_step("no end")
    job.stands(0, 1, 2)
    assert job.controller.stage is MindioStage.STOPPING
    job.stands(0, 1, 2)
    for rank in (0, 2):
        job.controller.reported(rank, ReportState.RS_NORMAL)
    job.passes(55)
    assert job.given_up == []
    job.passes(10)
    ((ranks, reason),) = job.given_up
    assert ranks == [1]
    assert "it did not leave its step within 60" in reason
    job.passes(60)
    assert len(job.given_up) == 1, "it is said once"


def test_who_compiles_is_waited_for_there_as_well() -> None:
    job = Job()
    job.give_up_step("no end")
    job.stands(0, 1, 2)
    job.stands(0, 1, 2)
    job.controller.reported(0, ReportState.RS_NORMAL)
    job.controller.reported(2, ReportState.RS_NORMAL)
    job.working = {1}
    job.passes(150)
    assert job.given_up == []


def test_a_debugger_is_waited_for_there_as_well() -> None:
    job = Job()
    job.give_up_step("no end")
    job.stands(0, 1, 2)
    job.stands(0, 1, 2)
    job.controller.reported(0, ReportState.RS_NORMAL)
    job.states[1] = RunState.TRACED
    job.passes(150)
    assert job.given_up == []


def test_where_no_rank_leaves_its_step_there_is_no_culprit() -> None:
    job = Job()
    job.give_up_step("no end")
    job.stands(0, 1, 2)
    job.stands(0, 1, 2)
    job.passes(150)
    assert job.given_up == []


def test_who_does_not_come_to_stand_is_given_up_before_the_job_is() -> None:
    """Native code that holds the GIL: nothing in that process answers."""
    job = Job()
    job.give_up_step("no end")
    job.stands(0, 2)
    job.passes(18)
    assert job.given_up == []
    job.passes(4)
    assert [ranks for ranks, _ in job.given_up] == [[1]]


@pytest.mark.parametrize("stage", [MindioStage.LOCKING, MindioStage.STOPPING, MindioStage.SAVING])
def test_who_is_stopped_in_a_recovery_is_given_up_after_a_second(stage: MindioStage) -> None:
    job = Job()
    if stage is MindioStage.SAVING:
        job.controller.gone(2)
        job.controller.hopeless = "over"
        job.stands(0, 1)
        (blamed,) = job.controller.pending
    else:
        blamed = 1
        job.give_up_step("no end")
        if stage is MindioStage.STOPPING:
            job.stands(0, 1, 2)
    assert job.controller.stage is stage
    job.states[blamed] = RunState.STOPPED
    job.passes(0.8)
    assert job.given_up == []
    job.passes(0.4)
    assert [ranks for ranks, _ in job.given_up] == [[blamed]]


@pytest.mark.parametrize("stage", [MindioStage.PAUSED, MindioStage.OVER])
def test_where_nobody_is_waited_for_nobody_is_late(stage: MindioStage) -> None:
    job = Job()
    job.controller.stage = stage
    job.states[1] = RunState.STOPPED
    job.passes(3600)
    assert (job.given_up, job.told) == ([], [])


def test_who_holds_what_nobody_else_does() -> None:
    job = MindioController(4)
    for rank in range(4):
        job.hello(rank)
    for rank in range(4):
        group = ReplicaGroup((0, 2), 2) if rank % 2 == 0 else ReplicaGroup((1, 3), 1)
        job.replicas(rank, (group,))
        job.status(rank, 3, updating=False)
    assert [job.can_do_without([rank]) for rank in range(4)] == [True, False, True, False]
    assert not job.can_do_without([0, 2])
    assert job.seats[0].present, "nobody is touched by the question"


def test_a_step_is_given_up_in_training_only() -> None:
    job = Job()
    assert job.controller.stalled("no end")
    assert job.controller.stalled("no end") == []


@pytest.mark.parametrize(
    ("used", "works"),
    [
        (lambda ms: Used(ms // 5, 0, in_storage=False), True),
        (lambda ms: Used(ms // 20, 0, in_storage=False), False),
        (lambda ms: Used(0, ms << 10, in_storage=False), True),
        (lambda ms: Used(0, ms, in_storage=False), False),
        (lambda ms: Used(0, 0, in_storage=True), True),
    ],
    ids=["a fifth of a processor", "a twentieth", "a megabyte a second", "a kilobyte a second", "in storage"],
)
def test_what_counts_as_work(used: Any, *, works: bool) -> None:
    now_ms = 0
    work = Work(60_000, lambda pids: {pid: used(now_ms) for pid in pids})
    for now_ms in range(0, 10_000, 100):
        work.look(now_ms, {0: 4711})
    assert (work.idle_ms(0, 10_000) <= 1000) == works
    work.forget(10_000)
    assert work.idle_ms(0, 10_000) == 0, "who was not looked at may have worked"


def test_what_the_kernel_tells() -> None:
    """Also of what a rank has started."""
    text = "import os, time\nif not os.fork():\n    deadline = time.monotonic() + 60\n    print(flush=True)\n"
    text += "    while time.monotonic() < deadline: {}\nos.fork()\nprint(flush=True)\ntime.sleep(60)"
    children = [
        subprocess.Popen([sys.executable, "-c", text.format(what)], stdout=subprocess.PIPE, start_new_session=True)
        for what in ("pass", "time.sleep(1)")
    ]
    busy, idle = (child.pid for child in children)
    try:
        for child in children:
            assert child.stdout is not None
            assert [child.stdout.readline() for _ in range(3)] == [b"\n"] * 3, "all that it starts is there"
        before = used = read_used([busy, idle])
        while used[busy].cpu_ms - before[busy].cpu_ms < 200:
            used = read_used([busy, idle])
        assert set(used) == {busy, idle}
        assert used[idle].cpu_ms - before[idle].cpu_ms < 50
        assert used[idle].moved_bytes > 0
    finally:
        for child in children:
            os.killpg(child.pid, 9)
            child.communicate()
