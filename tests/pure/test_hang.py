"""Who is hung, when, and who is only slow: the detector in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from resilient_train.protocol.hang import HangDetector, Limits, RunState, Stall, Suspicion
from resilient_train.protocol.progress import Activity, Progress
from resilient_train.protocol.standing import Phase

LOOK_MS = 50


@dataclass
class Job:
    """Ranks whose progress the test sets, looked at every 50 ms of virtual time."""

    ranks: int = 4
    limits: Limits = field(default_factory=Limits)
    now_ms: float = 0.0

    def __post_init__(self) -> None:
        self.detector = HangDetector(self.ranks, self.limits)
        self.progress = [Progress(0, Phase.COMPUTE, 0, Activity.TRAINING)] * self.ranks
        self.states = [RunState.RUNNING] * self.ranks
        self.found: list[Stall] = []

    def pass_ms(self, duration_ms: float) -> None:
        """Time goes by; nobody moves."""
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            self.look()
            self.now_ms = min(end_ms, self.now_ms + LOOK_MS)

    def look(self) -> None:
        finding = self.detector.observe(int(self.now_ms * 1e6), self.progress, lambda rank: self.states[rank])
        if finding is not None:
            self.found.append(finding)

    def all_at(self, phase: Phase, collectives: int = 0) -> None:
        self.progress = [each._replace(phase=phase, collectives=collectives) for each in self.progress]

    def put(self, rank: int, **changes: object) -> None:
        self.progress[rank] = self.progress[rank]._replace(**changes)

    def steps(self, count: int, step_ms: Callable[[], float]) -> None:
        for _ in range(count):
            self.all_at(Phase.COMPUTE, 1)
            self.pass_ms(step_ms())
            commits = self.progress[0].commits + 1
            self.progress = [Progress(commits, Phase.APPLIED, 0, Activity.TRAINING)] * self.ranks
            self.look()

    def until_hung(self, limit_ms: float) -> float:
        begin_ms = self.now_ms
        while not any(each.verdict in (Suspicion.HUNG, Suspicion.TOGETHER) for each in self.found):
            assert self.now_ms < begin_ms + limit_ms, f"no finding in {limit_ms} ms: {self.found}"
            self.pass_ms(LOOK_MS)
        return self.now_ms - begin_ms


def running(step_ms: float = 200, **limits: int) -> Job:
    job = Job(limits=Limits(**limits))
    job.steps(30, lambda: step_ms)
    assert job.found == []
    return job


def test_a_stopped_process_is_found_within_two_slow_steps_and_200_ms() -> None:
    for step_ms in (10, 200, 3000):
        job = running(step_ms)
        job.all_at(Phase.COMPUTE, 3)
        job.put(2, collectives=1)
        job.states[2] = RunState.STOPPED
        assert job.until_hung(10 * step_ms + 1000) <= 2 * (step_ms + LOOK_MS) + 200
        assert (job.found[-1].verdict, job.found[-1].ranks) == (Suspicion.HUNG, (2,))
        assert "SIGSTOP" in job.found[-1].why


@pytest.mark.parametrize("looks", [0, 1])
def test_two_that_one_hand_stops_are_found_together(looks: int) -> None:
    """Whether or not it is looked in between. Named alone, the first would be killed since the second has its state."""
    job = running()
    job.pass_ms(1000)
    job.states[1] = RunState.STOPPED
    for _ in range(looks):
        job.look()
    job.states[3] = RunState.STOPPED
    job.until_hung(2000)
    assert job.found[-1].ranks == (1, 3)


def test_a_process_stopped_for_one_look_only_is_not_hung() -> None:
    job = running()
    job.pass_ms(1000)
    job.states[1] = RunState.STOPPED
    job.look()
    job.states[1] = RunState.RUNNING
    job.pass_ms(1000)
    assert all(each.verdict is Suspicion.BEHIND for each in job.found)


def test_who_waited_for_others_is_stopped_since_then_only() -> None:
    """It was taken for hung at once: what it had waited before counted too."""
    job = running()
    job.put(0, phase=Phase.COMPUTE)
    job.put(1, phase=Phase.READY)
    job.pass_ms(4000)
    job.states[1] = RunState.STOPPED
    job.pass_ms(300)
    job.states[1] = RunState.RUNNING
    job.pass_ms(300)
    assert all(each.verdict is Suspicion.BEHIND for each in job.found)
    job.states[1] = RunState.STOPPED
    assert 400 <= job.until_hung(1000) <= 600
    assert (job.found[-1].ranks, job.found[-1].stalled_ms < 600) == ((1,), True)


def test_short_steps_are_known_as_soon_as_long_ones() -> None:
    """A dozen between two looks: in a quarter of a second it was not known what a step of 4 ms takes."""
    job = Job()
    for commits in range(0, 36, 12):
        assert job.detector.stopped_ms() == 2000
        job.progress = [Progress(commits, Phase.APPLIED, 0, Activity.TRAINING)] * job.ranks
        job.look()
        job.now_ms += LOOK_MS
    assert job.detector.stopped_ms() == 100
    assert job.detector.usual_ms() == pytest.approx(LOOK_MS / 12)


def test_a_stopped_process_before_the_job_is_known() -> None:
    job = Job()
    job.states[0] = RunState.STOPPED
    assert 2000 <= job.until_hung(5000) <= 2200


PLACES = [
    (Progress(40, Phase.COMPUTE, 1, Activity.TRAINING), Progress(40, Phase.COMPUTE, 2, Activity.TRAINING)),
    (Progress(40, Phase.COMPUTE, 2, Activity.TRAINING), Progress(40, Phase.READY, 2, Activity.TRAINING)),
    (Progress(40, Phase.UPDATING, 2, Activity.TRAINING), Progress(41, Phase.COMPUTE, 1, Activity.TRAINING)),
    (Progress(40, Phase.APPLIED, 5, Activity.TRAINING), Progress(40, Phase.COMPUTE, 1, Activity.TRAINING)),
    (Progress(40, Phase.APPLIED, 1, Activity.TRAINING), Progress(40, Phase.APPLIED, 2, Activity.TRAINING)),
    (Progress(40, Phase.COMPUTE, 0, Activity.LOADING), Progress(40, Phase.COMPUTE, 1, Activity.TRAINING)),
    (Progress(39, Phase.COMPUTE, 3, Activity.TRAINING), Progress(40, Phase.COMPUTE, 0, Activity.FINISHED)),
    # It was replaced too late to know that the others have left their loops by a `break`.
    (Progress(40, Phase.COMPUTE, 3, Activity.TRAINING), Progress(40, Phase.COMPUTE, 0, Activity.FINISHED)),
]


@pytest.mark.parametrize(("culprit", "others"), PLACES)
def test_the_one_who_holds_the_others_up_is_named(culprit: Progress, others: Progress) -> None:
    job = running()
    job.progress = [others] * 4
    job.progress[3] = culprit
    waited_ms = job.until_hung(100_000)
    assert 60_000 <= waited_ms <= 60_200
    assert [each.verdict for each in job.found] == [Suspicion.BEHIND, Suspicion.SUSPECT, Suspicion.HUNG]
    assert all(each.ranks == (3,) for each in job.found)
    assert ("batch" in job.found[-1].why) == (culprit.activity is Activity.LOADING)


@pytest.mark.parametrize(
    ("without", "culprits"), [((2,), (2,)), ((0, 1), (0, 1)), ((0, 1, 3), (2,))], ids=["one", "half", "most"]
)
def test_who_waits_to_update_never_meets_who_is_in_a_collective_of_the_window(
    without: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    """However little is known of the job. Those who are fewer are wrong; of two halves, those who left one out."""
    job = Job()
    job.all_at(Phase.COMPUTE, 3)
    for rank in without:
        job.put(rank, phase=Phase.READY, collectives=2)
    job.look()
    job.pass_ms(450)
    assert not job.found
    job.pass_ms(2500)
    assert [each.verdict for each in job.found] == [Suspicion.SUSPECT]
    job.pass_ms(200)
    assert [each.verdict for each in job.found] == [Suspicion.SUSPECT, Suspicion.HUNG]
    for found in job.found:
        assert found.ranks == culprits
        assert not found.stopped
        assert "never meet" in found.why


def test_who_is_apart_is_not_said_to_be_behind() -> None:
    """The rank that is least far need not be the one that is wrong: most have left the collective out."""
    job = running()
    job.progress = [Progress(40, Phase.READY, 1, Activity.TRAINING)] * 4
    job.put(3, phase=Phase.COMPUTE, collectives=2)
    job.pass_ms(30_000)
    assert [each.verdict for each in job.found] == [Suspicion.SUSPECT, Suspicion.HUNG]
    assert all(each.ranks == (3,) for each in job.found)


@pytest.mark.parametrize(
    "other",
    [
        Progress(0, Phase.READY, 3, Activity.TRAINING),
        Progress(0, Phase.COMPUTE, 2, Activity.TRAINING),
        Progress(1, Phase.READY, 2, Activity.TRAINING),
        Progress(0, Phase.APPLIED, 2, Activity.TRAINING),
        Progress(0, Phase.READY, 2, Activity.LEAVING),
    ],
    ids=["all-called", "not-there-yet", "of-another-window", "in-the-tail", "leaving"],
)
def test_others_may_meet_yet(other: Progress) -> None:
    job = Job()
    job.all_at(Phase.COMPUTE, 3)
    job.progress[2] = other
    job.look()
    job.pass_ms(30_000)
    assert all(each.verdict is Suspicion.BEHIND for each in job.found)


def test_the_limit_follows_the_jobs_own_steps() -> None:
    job = running(step_ms=30_000)
    job.all_at(Phase.COMPUTE, 2)
    job.put(0, collectives=1)
    assert 300_000 <= job.until_hung(400_000) <= 301_000


def test_the_limit_can_be_set() -> None:
    job = running(fixed_ms=1500)
    job.all_at(Phase.COMPUTE, 2)
    job.put(0, collectives=1)
    assert 1500 <= job.until_hung(4000) <= 1600


def test_all_in_one_collective_have_no_culprit() -> None:
    job = running(fixed_ms=1000)
    job.all_at(Phase.COMPUTE, 2)
    assert 10_000 <= job.until_hung(20_000) <= 10_100
    assert (job.found[-1].verdict, job.found[-1].ranks) == (Suspicion.TOGETHER, ())


def test_first_steps_have_the_long_limit_and_are_not_counted() -> None:
    job = Job()
    job.put(0, collectives=1)
    job.pass_ms(400_000)
    assert [each.verdict for each in job.found] == [Suspicion.SUSPECT]
    job.steps(3, lambda: 90_000)
    job.steps(20, lambda: 100)
    assert job.detector._limit_ms() == 60_000


@pytest.mark.parametrize("who", [0, 2])
def test_declared_slow_work_is_excused(who: int) -> None:
    job = running()
    job.all_at(Phase.COMPUTE, 2)
    job.put(0, collectives=1)
    job.put(who, activity=Activity.SLOW)
    job.pass_ms(3_600_000)
    assert job.found == []
    job.put(who, activity=Activity.TRAINING)
    job.steps(3, lambda: 200)
    assert job.detector._limit_ms() == 60_000, "an hour of evaluation is no usual step"


def test_a_debugger_is_excused() -> None:
    job = running()
    job.states[1] = RunState.TRACED
    job.pass_ms(3_600_000)
    assert job.found == []


def test_a_recovery_begins_anew_and_keeps_what_is_usual() -> None:
    job = running()
    job.all_at(Phase.COMPUTE, 1)
    job.put(1, collectives=0)
    job.pass_ms(50_000)
    job.found.clear()
    job.detector.restart(int(job.now_ms * 1e6))
    job.pass_ms(59_000)
    assert all(each.verdict is not Suspicion.HUNG for each in job.found)
    assert job.detector.stopped_ms() < 1000


def test_a_window_that_is_computed_again_begins_nothing_anew() -> None:
    """The limits are those of the job's own steps, and the time until then is nobody's."""
    job = running()
    job.all_at(Phase.COMPUTE, 1)
    job.put(1, collectives=0)
    job.pass_ms(50_000)
    job.found.clear()
    job.detector.again(int(job.now_ms * 1e6))
    job.pass_ms(59_000)
    assert all(each.verdict is not Suspicion.HUNG for each in job.found)
    job.pass_ms(2_000)
    assert [each.ranks for each in job.found if each.verdict is Suspicion.HUNG] == [(1,)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
def test_no_false_alarm_in_twenty_thousand_steps(seed: int) -> None:
    """Step times with a heavy tail (ten times the median now and then), pauses of collectors, a slow rank."""
    chance = random.Random(seed)

    def step_ms() -> float:
        if chance.random() < 0.001:
            return 200 * chance.uniform(5, 10)
        return 200 * chance.lognormvariate(0, 0.3)

    job = Job(ranks=2)
    job.steps(20_000, step_ms)
    assert [each for each in job.found if each.verdict is not Suspicion.BEHIND] == []


def test_a_rank_may_leave_its_step_as_slowly_as_it_works() -> None:
    """Rank 0 evaluates behind each update: a fault elsewhere is no reason to end it for that."""
    assert 300_000 <= running(step_ms=30_000).detector.leave_limit_ms() <= 301_000
    assert running(step_ms=200).detector.leave_limit_ms() == 60_000
    assert running(step_ms=1000, fixed_ms=1500).detector.leave_limit_ms() == 1500
    assert Job().detector.leave_limit_ms() == 60_000
