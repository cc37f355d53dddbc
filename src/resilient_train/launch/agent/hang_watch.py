"""The agent's hang watch: for hangs, and for recoveries that do not come to their end.

It reads all ranks' progress from shared memory and asks the kernel about their processes. What it finds is decided in
``protocol/hang.py``, who is killed for it in ``protocol/controller.py``. What is done: an event; the Python stacks and
the newest collectives of all ranks into the run directory; the culprit is killed, and its death is a fault like any
other. All limits are counted in the job's own time (``protocol/jobclock.py``), and those of a recovery anew in each of
its phases.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

from resilient_train._native import Board
from resilient_train.config import Settings
from resilient_train.interrupt import STACKS_SIGNAL
from resilient_train.launch.agent.collective_reports import CollectiveReports, Newest
from resilient_train.launch.agent.processes import Processes, RankProcess
from resilient_train.protocol.hang import HangDetector, Limits, RunState, Stall, StoppedLooks, Suspicion
from resilient_train.protocol.job import Job, Stage
from resilient_train.protocol.jobclock import JobClock
from resilient_train.protocol.progress import Activity, Progress, progress_of

LOOK_S = 0.05
_STACKS_S = 0.2
"""Time for stacks to be written."""
_STOPPED_LOOKS = 20
"""Looks at a rank that stays stopped, before it is killed: before the first step, and at most in a recovery."""
_AGAIN_NS = 10_000_000_000
"""Between two lines of the same kind, and between two tries to have the same rank given up."""


class HangKeeper(Protocol):
    """What the hang watch may do: implemented by the agent."""

    def fence(self, ranks: Collection[int], reason: str) -> None:
        """Has the ranks' processes killed, as far as that may be; their deaths will be told with ``reason``."""
        ...

    def hold_up(self, ranks: Collection[int], reason: str) -> None:
        """The ranks hold the others up: to be killed, or what they wait for will not come."""
        ...

    def give_up_collective(self, detail: str) -> None:
        """A collective does not end although all are in it: all ranks are to rebuild."""
        ...

    def expire(self, limit_s: float, stopped: Collection[int]) -> None:
        """A phase of the recovery has lasted so long."""
        ...

    def outwait(self, limit_s: float) -> None:
        """The recovery has waited for a survivor for so long: as long as to do again what is not saved."""
        ...

    def tell(self, finding: Stall, detail: dict[str, object]) -> None:
        """Writes the event, and a line for people."""
        ...

    def tell_newest(self, newest: Newest) -> None:
        """The ranks have said which collectives they have entered last."""
        ...

    def tell_pause(self, paused_s: float, stopped: Collection[int]) -> None:
        """None of the ranks has run for so long; ``stopped`` (SIGSTOP) are those that somebody can continue."""
        ...


class HangWatch:
    """``look`` is called every ``LOOK_S``."""

    def __init__(
        self, board: Board, job: Job, processes: Processes, reports: CollectiveReports, settings: Settings
    ) -> None:
        limits = Limits(floor_ms=int(settings.hang_floor_s * 1000), fixed_ms=int(settings.hang_timeout_s * 1000))
        self._detector = HangDetector(board.world_size, limits)
        self._clock = JobClock(board.world_size, settings.beat_ms)
        self._finds_hangs = settings.hang
        self._phase_limit_s = settings.join_timeout_s
        self._board = board
        self._job = job
        self._processes = processes
        self._reports = reports
        self._reported: list[Progress] = []
        """Where the ranks stood when they were asked for their collectives."""
        self._seen: tuple[Stage, int, bool] = (Stage.STARTING, 0, False)
        self._since_ns = 0
        self._suspected = False
        """Of those that don't leave their step for this recovery, the stacks were asked for."""
        self._stopped = StoppedLooks()
        self._named_ns: dict[int, int] = {}
        self._pause_told_ns = 0
        self._outwaited_ns = -_AGAIN_NS

    def look(self, keeper: HangKeeper) -> None:
        """One look. Cheap while the job moves: a few loads per rank."""
        job = self._job
        newest = self._reports.look()
        if newest is not None:
            keeper.tell_newest(newest)
        if job.stage is Stage.STARTING:
            self._look_at_start(keeper)
        if job.stage not in (Stage.RUNNING, Stage.RECOVERING, Stage.PAUSED, Stage.LEAVING):
            return
        ranks = [progress_of(self._board.progress(rank)) for rank in range(self._board.world_size)]
        self._tick(ranks, keeper)
        self._notice_phase()
        if job.stage is Stage.PAUSED:
            return  # nobody is waited for
        if job.stage is not Stage.RUNNING:
            self._look_at_recovery(ranks, keeper)
        elif self._finds_hangs:
            finding = self._detector.observe(self._clock.now_ns, ranks, self._state)
            if finding is not None:
                self._act(finding, ranks, keeper)

    def _look_at_start(self, keeper: HangKeeper) -> None:
        """All wait for one that is stopped. Where all are, nobody is to blame."""
        job = self._job
        if not (self._finds_hangs and job.uses_a_session()):
            return
        stopped = [rank for rank in range(job.world_size) if self._state(rank) is RunState.STOPPED]
        self._stopped.see(stopped if len(stopped) < job.world_size else [])
        # Not by _fence: the job's clock stands still before the first step, and all of this may come several times.
        if due := self._stopped.due(_STOPPED_LOOKS):
            self._stopped.clear()
            keeper.fence(due, "hung: its process was stopped (SIGSTOP)")

    def _tick(self, ranks: list[Progress], keeper: HangKeeper) -> None:
        paused_before = self._clock.paused_ns
        beats = tuple(map(self._board.beats, range(self._board.world_size)))
        self._clock.tick(time.monotonic_ns(), (beats, *ranks), self._state)
        paused_ns = self._clock.paused_ns
        if paused_before and not paused_ns:
            self._detector.resume()
            self._pause_told_ns = 0
        elif paused_ns - self._pause_told_ns >= _AGAIN_NS:
            self._pause_told_ns = paused_ns
            keeper.tell_pause(paused_ns / 1e9, [r for r in range(len(ranks)) if self._state(r) is RunState.STOPPED])

    def _notice_phase(self) -> None:
        """Each phase of a recovery has a limit of its own: until all have joined, and until all are where they go."""
        job = self._job
        seen = job.stage, job.generation, job.plan is None
        if self._seen == seen:
            return
        if self._seen[:2] != seen[:2]:
            self._stopped.clear()
            self._named_ns.clear()
            self._reported = []
            self._suspected = False
            if job.verifying and job.stage is Stage.RUNNING:
                self._detector.again(self._clock.now_ns)
            elif not job.verifying:
                self._detector.restart(self._clock.now_ns)
        self._seen = seen
        self._since_ns = self._clock.now_ns

    def _state(self, rank: int) -> RunState:
        process = self._processes.current.get(rank)
        return process.state() if process is not None else RunState.RUNNING

    def _look_at_recovery(self, ranks: list[Progress], keeper: HangKeeper) -> None:
        """It waits for all ranks, and one that is stopped, or does not leave its step, will never come."""
        waited_for = self._job.awaited() if self._job.plan is None else range(len(ranks))
        if any(ranks[rank].activity is Activity.SLOW or self._state(rank) is RunState.TRACED for rank in waited_for):
            self._since_ns = self._clock.now_ns
        waited_ms = (self._clock.now_ns - self._since_ns) // 1_000_000
        if self._clock.paused_ns:
            self._stopped.clear()
        else:
            self._stopped.see([rank for rank in range(len(ranks)) if self._state(rank) is RunState.STOPPED])
        if self._finds_hangs:
            reason = "hung: its process was stopped (SIGSTOP) in the middle of a recovery"
            self._fence(self._stopped.due(self._stopped_looks()), reason, keeper)
            limit_ms = self._detector.leave_limit_ms()
            if waited_ms > limit_ms // 2 and self._job.awaited() and not self._suspected:
                self._suspected = True
                stay = sorted(self._job.awaited())
                why = "it does not leave its step for a fault elsewhere"
                self._act(Stall(Suspicion.SUSPECT, tuple(stay), waited_ms, limit_ms, why), ranks, keeper)
            if waited_ms > limit_ms:
                reason = f"hung: it did not leave its step within {waited_ms} ms of a fault elsewhere"
                self._fence(self._job.awaited(), reason, keeper)
                self._outwait(waited_ms, max(limit_ms, self._back_ms(ranks)), keeper)
        if waited_ms > self._phase_limit_s * 1000:
            self._since_ns = self._clock.now_ns
            keeper.expire(self._phase_limit_s, self._stopped.seen())

    def _stopped_looks(self) -> int:
        """So many looks in a row have to see a rank stopped in a recovery, before it is killed.

        As in a step: twice what a usual one takes. However busy the machine is, it stops nobody: a process that waits
        for a processor, a disk or a lock is running to the kernel, and one under a debugger is traced. So what is
        waited for is not a slow rank, but somebody who stops one for a moment and continues it. What is a moment on
        this machine, the job's own steps tell: they are longer on a busy one. Counted in looks, and not in time: an
        agent that did not run itself has seen nothing meanwhile, and each look after that is one more chance.
        """
        return min(_STOPPED_LOOKS, 1 + math.ceil(self._detector.stopped_ms() / 1000 / LOOK_S))

    def _outwait(self, waited_ms: int, back_ms: float, keeper: HangKeeper) -> None:
        """Not at each look: where all may not go back, whether they may is asked of the snapshots' holder."""
        now_ns = self._clock.now_ns
        if waited_ms > back_ms and now_ns - self._outwaited_ns >= _AGAIN_NS:
            self._outwaited_ns = now_ns
            keeper.outwait(back_ms / 1000)

    def _back_ms(self, ranks: list[Progress]) -> float:
        """How long it would take to do again what is not saved. To wait as long for who alone has it, and to go back
        then, takes twice as long at most as what would have been best, whenever it would have come.
        """
        saved, usual_ms = self._job.newest_saved(), self._detector.usual_ms()
        return usual_ms * (max(rank.commits for rank in ranks) - saved) if saved >= 0 and usual_ms else math.inf

    def _fence(self, ranks: Collection[int], reason: str, keeper: HangKeeper) -> None:
        """Who may not be killed is named again after a while: others may have its state by then."""
        now_ns = self._clock.now_ns
        due = [rank for rank in ranks if now_ns - self._named_ns.get(rank, -_AGAIN_NS) >= _AGAIN_NS]
        if due:
            self._named_ns.update(dict.fromkeys(ranks, now_ns))
            keeper.fence(ranks, reason)

    def _act(self, finding: Stall, ranks: list[Progress], keeper: HangKeeper) -> None:
        detail = finding.detail()
        if finding.verdict is not Suspicion.BEHIND:
            listening = ask_for_stacks(self._processes.living())
            detail["stacks"] = [process.rank for process in listening]
            if self._reported != ranks:  # as a rule the same stall was suspect before
                self._reported = ranks
                # Who dumps the stacks walks through frames of threads that run: one that begins to answer ended a rank.
                self._reports.ask(listening, after_s=_STACKS_S)
        keeper.tell(finding, detail)
        if finding.verdict is Suspicion.HUNG:
            give_up = keeper.fence if finding.stopped else keeper.hold_up
            give_up(finding.ranks, f"hung for {finding.stalled_ms} ms: {finding.why}")
        elif finding.verdict is Suspicion.TOGETHER:
            keeper.give_up_collective(f"no end for {finding.stalled_ms} ms: {finding.why}")


def ask_for_stacks(processes: Iterable[RankProcess]) -> list[RankProcess]:
    """Those that were asked: only those that listen, for the signal would kill another."""
    listening = [process for process in processes if _listens(process.pid)]
    for process in listening:
        process.signal(STACKS_SIGNAL)
    return listening


def _listens(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (STACKS_SIGNAL - 1) & 1)
