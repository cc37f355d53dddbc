"""Time that counts against ranks: not while none of them runs, nor while the agent itself did not."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilient_train.protocol.hang import HangDetector, Limits, RunState, Suspicion
from resilient_train.protocol.jobclock import JobClock
from resilient_train.protocol.progress import Activity, Progress
from resilient_train.protocol.standing import Phase

LOOK_MS = 50


@dataclass
class Job:
    """Ranks that beat while they run, looked at every 50 ms of virtual time."""

    ranks: int = 3
    frozen: set[int] = field(default_factory=set)
    """They do not beat."""
    states: dict[int, RunState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = JobClock(self.ranks, beat_ms=50)
        self.time_ms = 0.0
        self.beats = [0] * self.ranks
        self.asked = 0

    def state(self, rank: int) -> RunState:
        self.asked += 1
        return self.states.get(rank, RunState.RUNNING)

    def look(self, after_ms: float = LOOK_MS) -> None:
        self.time_ms += after_ms
        self.beats = [beat + (rank not in self.frozen) for rank, beat in enumerate(self.beats)]
        self.clock.tick(int(self.time_ms * 1e6), tuple(self.beats), self.state)

    def pass_ms(self, duration_ms: float) -> float:
        """Returns how much of it counted."""
        before_ns = self.clock.now_ns
        for _ in range(int(duration_ms / LOOK_MS)):
            self.look()
        return (self.clock.now_ns - before_ns) / 1e6

    def stop(self, *ranks: int) -> None:
        self.frozen.update(ranks)
        self.states.update(dict.fromkeys(ranks, RunState.STOPPED))

    def go_on(self, *ranks: int) -> None:
        self.frozen.difference_update(ranks)
        for rank in ranks:
            self.states.pop(rank, None)


def test_while_anybody_runs_time_passes_and_nobody_is_asked() -> None:
    job = Job()
    job.look()
    assert job.pass_ms(10_000) == 10_000
    job.stop(0, 1)
    assert job.pass_ms(10_000) == 10_000
    assert job.asked == 0
    assert job.clock.paused_ns == 0


def test_all_stopped() -> None:
    job = Job()
    job.pass_ms(1000)
    job.stop(0, 1, 2)
    assert job.pass_ms(60_000) == 0
    assert job.clock.paused_ns == 60_000 * 1_000_000
    job.go_on(2)
    assert job.pass_ms(1000) == 1000
    assert job.clock.paused_ns == 0


def test_a_container_that_is_frozen_looks_as_if_nobody_beat() -> None:
    job = Job()
    job.pass_ms(1000)
    job.frozen.update(range(3))
    assert job.pass_ms(60_000) <= 500, "until it is sure"
    assert job.clock.paused_ns > 59_000 * 1_000_000


def test_the_agent_was_paused_too_and_goes_on_first() -> None:
    job = Job()
    job.pass_ms(1000)
    job.stop(0, 1, 2)
    before_ns = job.clock.now_ns
    job.look(after_ms=3_600_000)
    job.pass_ms(500)
    assert job.clock.now_ns == before_ns
    job.go_on(0, 1, 2)
    assert job.pass_ms(1000) == 1000


def test_the_agent_alone_was_paused() -> None:
    job = Job()
    job.pass_ms(1000)
    before_ns = job.clock.now_ns
    job.look(after_ms=30_000)
    assert job.clock.now_ns == before_ns, "it can't know what the ranks have done"
    assert job.pass_ms(1000) == 1000


def test_who_is_not_continued_is_found_after_the_time_of_a_job_that_is_not_known() -> None:
    """Ranks are not continued all at once; with steps of 20 ms a tenth of a second would be long."""
    detector = HangDetector(3, Limits())
    now_ms = 0.0
    states = [RunState.RUNNING] * 3
    found: list[Suspicion] = []

    def look(progress: Progress) -> None:
        nonlocal now_ms
        now_ms += LOOK_MS
        finding = detector.observe(int(now_ms * 1e6), [progress] * 3, lambda rank: states[rank])
        if finding is not None:
            found.append(finding.verdict)

    for commits in range(40):
        look(Progress(commits, Phase.APPLIED, 0, Activity.TRAINING))
    last = Progress(39, Phase.COMPUTE, 1, Activity.TRAINING)
    states[2] = RunState.STOPPED
    detector.resume()
    for _ in range(38):
        look(last)
    assert found == []
    for _ in range(4):
        look(last)
    assert found == [Suspicion.HUNG]
