"""The hang watch of a MindSpore job: as ``hang_watch.py``, for ranks that tell of their updates and of nothing else.

``protocol/hang.py`` decides; a rank's progress is what it tells its controller. All that is between two updates looks
the same from there, so who hangs in it is found by a stop: all are to leave their step, and do it over; the one that
does not leave it hangs. It is killed, and its death is a fault like any other.

Two things differ from a job with a Session. No rank can say that it takes its time (it compiles, evaluates, saves), so
the limits are longer, and who works (``process_activity.py``) is not given up. And nothing is looked at before each
rank has made its first update, or behind the end of one, since a loss there can't be repaired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from resilient_train.config import Settings
from resilient_train.integrations.mindio.controller import MindioStage
from resilient_train.launch.agent.hang_watch import ask_for_stacks
from resilient_train.launch.agent.process_activity import Work
from resilient_train.launch.agent.processes import RankProcess
from resilient_train.protocol.hang import HangDetector, Limits, RunState, Stall, StoppedLooks, Suspicion
from resilient_train.protocol.jobclock import JobClock
from resilient_train.protocol.progress import Activity, Progress
from resilient_train.protocol.standing import Phase

LOOK_S = 0.1
_STOPPED_LOOKS = 10
"""So many looks in a row see a rank stopped in a recovery, before it is killed."""
_FLOORS, _TOGETHER = 10, 30
"""Times ``RESILIENT_HANG_FLOOR_S``: the least limit of a rank that is behind, and that of a step that no rank ends."""
_TOLD_NS = 10_000_000_000
_LEAVING_S = {MindioStage.LOCKING: 20.0, MindioStage.STOPPING: 120.0}
"""Where a training thread is to come out of its step: less than the stage may take, behind which the job ends."""


class MindSporeHangKeeper(Protocol):
    """What the hang watch may do: implemented by the agent."""

    def give_up(self, ranks: Collection[int], reason: str) -> None:
        """Has them killed, if others hold their state."""
        ...

    def give_up_step(self, reason: str) -> None:
        """All are to leave it, and do it over."""
        ...

    def tell(self, finding: Stall, detail: dict[str, object]) -> None:
        """Writes the event, and a line for people."""
        ...

    def tell_pause(self, paused_s: float, stopped: Collection[int]) -> None:
        """None of the ranks has run for so long."""
        ...


class WatchedSeat(Protocol):
    """One rank: how many updates it has ended, whether it writes one, whether it has come to its end."""

    @property
    def step(self) -> int: ...

    @property
    def updating(self) -> bool: ...

    @property
    def left(self) -> bool: ...


class WatchedJob(Protocol):
    """A ``MindioController``, or what knows as much of ranks without one."""

    @property
    def stage(self) -> MindioStage: ...

    @property
    def round(self) -> int: ...

    @property
    def seats(self) -> Sequence[WatchedSeat]: ...

    def awaited(self) -> frozenset[int]:
        """Whose answer, or whose training thread, is waited for now."""
        ...

    def steady(self) -> Sequence[int]:
        """Ranks whose process was there before this recovery."""
        ...


class MindSporeProgress(Progress):
    """With words for what is known here."""

    def describe(self) -> str:
        """For people: updates are counted from 1, as MindSpore does."""
        if self.phase is Phase.UPDATING:
            return f"is writing update {self.commits + 1}"
        return f"is between updates {self.commits} and {self.commits + 1}"


class MindSporeHangWatch:
    """``look`` is called every ``LOOK_S``. ``running``: the processes, by rank."""

    def __init__(
        self,
        job: WatchedJob,
        running: Mapping[int, RankProcess],
        world_size: int,
        settings: Settings,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        work: Work | None = None,
    ) -> None:
        floor_ms = int(settings.hang_floor_s * 1000)
        limits = Limits(
            floor_ms=_FLOORS * floor_ms,
            fixed_ms=int(settings.hang_timeout_s * 1000),
            together_ms=_TOGETHER * floor_ms,
        )
        self._leave_s = settings.hang_timeout_s or settings.hang_floor_s
        self._job, self._running = job, running
        self._world_size = world_size
        self._detector = HangDetector(self._world_size, limits)
        self._clock = JobClock(self._world_size, settings.beat_ms)
        self._monotonic_ns = clock
        self._work = work or Work(int(self._leave_s * 1000))
        self._seen: tuple[MindioStage, int] = (MindioStage.STARTING, 0)
        self._since_ns = 0
        self._stopped = StoppedLooks()
        self._given_up: set[int] = set()
        """In this stage of a recovery."""
        self._last: list[Progress] = []
        self._pause_told_ns = 0

    def look(self, keeper: MindSporeHangKeeper) -> None:
        """One look. Cheap while the job moves."""
        job = self._job
        self._tick(keeper)
        if self._seen != (job.stage, job.round):
            self._seen, self._since_ns = (job.stage, job.round), self._clock.now_ns
            self._stopped.clear()
            self._given_up.clear()
            self._work.forget(self._clock.now_ns / 1e6)
            self._detector.restart(self._clock.now_ns)
        if job.stage in (MindioStage.TRAINING, MindioStage.HALTING):
            seats = job.seats
            if all(seat.step and not seat.left for seat in seats):
                self._look_at_training(seats, keeper)
        else:
            self._look_at_recovery(keeper)

    def _tick(self, keeper: MindSporeHangKeeper) -> None:
        """Ranks have no beat here: the job's time passes while any of them is not stopped."""
        now_ns = self._monotonic_ns()
        stopped = [rank for rank in range(self._world_size) if self._state(rank) is RunState.STOPPED]
        paused_before = self._clock.paused_ns
        self._clock.tick(now_ns, None if len(stopped) == self._world_size else now_ns, self._state)
        paused_ns = self._clock.paused_ns
        if paused_before and not paused_ns:
            self._detector.resume()
            self._pause_told_ns = 0
        elif paused_ns - self._pause_told_ns >= _TOLD_NS:
            self._pause_told_ns = paused_ns
            keeper.tell_pause(paused_ns / 1e9, stopped)

    def _state(self, rank: int) -> RunState:
        process = self._running.get(rank)
        return process.state() if process is not None else RunState.RUNNING

    def _look_at_training(self, seats: Sequence[WatchedSeat], keeper: MindSporeHangKeeper) -> None:
        ranks: list[Progress] = [_progress(seat) for seat in seats]
        if ranks != self._last:
            self._work.forget(self._clock.now_ns / 1e6)
        else:
            self._look_at_work()
        self._last = ranks
        finding = self._detector.observe(self._clock.now_ns, ranks, self._state)
        if finding is None:
            return
        watched = finding.ranks or range(self._world_size)
        may_be_slow = finding.verdict is not Suspicion.BEHIND and not finding.stopped
        idle_ms = finding.stalled_ms / (4 if finding.verdict is Suspicion.SUSPECT else 2)
        if may_be_slow and self._works(watched, idle_ms):
            self._detector.again(self._clock.now_ns)
        else:
            self._act(finding, keeper)

    def _look_at_work(self) -> None:
        pids = {rank: each.pid for rank, each in self._running.items() if 0 <= rank < self._world_size}
        self._work.look(self._clock.now_ns / 1e6, pids)

    def _works(self, ranks: Collection[int], idle_ms: float) -> bool:
        """One that has done something within that time takes its time."""
        now_ms = self._clock.now_ns / 1e6
        return any(self._work.idle_ms(rank, now_ms) < idle_ms for rank in ranks)

    def _act(self, finding: Stall, keeper: MindSporeHangKeeper) -> None:
        detail = finding.detail()
        if finding.verdict is not Suspicion.BEHIND:
            ranks = (each for rank, each in sorted(self._running.items()) if 0 <= rank < self._world_size)
            detail["stacks"] = [process.rank for process in ask_for_stacks(ranks)]
        keeper.tell(finding, detail)
        if finding.verdict is Suspicion.HUNG:
            keeper.give_up(finding.ranks, f"hung for {finding.stalled_ms} ms: {finding.why}")
        elif finding.verdict is Suspicion.TOGETHER:
            keeper.give_up_step(f"no end for {finding.stalled_ms} ms: {finding.why}")

    # -- in a recovery

    def _look_at_recovery(self, keeper: MindSporeHangKeeper) -> None:
        """It waits for ranks, and one that is stopped, or does not leave its step, will never come."""
        awaited = self._job.awaited() - self._given_up
        if self._clock.paused_ns:
            self._stopped.clear()
        else:
            self._stopped.see([rank for rank in sorted(awaited) if self._state(rank) is RunState.STOPPED])
        if due := self._stopped.due(_STOPPED_LOOKS):
            self._give_up(due, "hung: its process was stopped (SIGSTOP) in the middle of a recovery", keeper)
        elif self._job.stage in _LEAVING_S:
            self._look_for_who_stays(awaited, keeper)

    def _look_for_who_stays(self, awaited: Collection[int], keeper: MindSporeHangKeeper) -> None:
        """Where none has come there is no culprit."""
        if not awaited or len(awaited) == len(self._job.steady()):
            return
        if any(self._state(rank) is RunState.TRACED for rank in awaited):
            self._since_ns = self._clock.now_ns
        self._look_at_work()
        waited_ms = (self._clock.now_ns - self._since_ns) / 1e6
        limit_ms = min(self._leave_s, _LEAVING_S[self._job.stage]) * 1000
        if waited_ms < limit_ms or self._works(awaited, waited_ms / 2):
            return
        why = f"it did not leave its step within {waited_ms:.0f} ms of a fault elsewhere"
        self._given_up |= set(awaited)
        self._act(Stall(Suspicion.HUNG, tuple(sorted(awaited)), int(waited_ms), int(limit_ms), why), keeper)

    def _give_up(self, ranks: Collection[int], reason: str, keeper: MindSporeHangKeeper) -> None:
        self._given_up |= set(ranks)
        keeper.give_up(ranks, reason)


def _progress(seat: WatchedSeat) -> MindSporeProgress:
    phase = Phase.UPDATING if seat.updating else Phase.COMPUTE
    return MindSporeProgress(seat.step, phase, 0, Activity.TRAINING)
