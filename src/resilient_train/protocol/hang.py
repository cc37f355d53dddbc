"""Tells a hang from a slow step: a pure state machine that is shown all ranks' progress, again and again.

Nothing moves: no rank has entered a collective, changed its phase or committed. How long that may last depends on how
sure we are, and on the job's own steps (their 99th percentile, p99)::

    2 x p99                    a rank's process is stopped (SIGSTOP): it can't be slow, it does nothing    -> HUNG
    3 s                        a rank waits to update, and others in a collective that it has left out     -> HUNG
    5 x median, at least 1 s   the ranks that are least far are named                                     -> BEHIND
    half of the limit          they are about to be given up: record what they do                         -> SUSPECT
    limit = max(10 x p99, floor), or what the user set                                                    -> HUNG

``jobclock.py`` counts the time: while nobody of the job runs, none passes. When it goes on after such a pause, who is
still stopped has the time that a job has of which nothing is known: ranks are not continued all at once.

A rank that waits to update calls nothing more before all do, and no update begins before all collectives of its window
are over. So these wait for each other for ever, however slow they are.

When all ranks are equally far there is no culprit: a collective that all have entered does not end. That has a longer
limit (all may compile), and costs no process (-> TOGETHER). The first steps after a start or a recovery have that limit
too. While a rank says that it takes its time (``session.slow``), or a debugger holds it, no time passes.

A time-out can be wrong; whoever is given up must therefore be fenced (killed) before it is replaced.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from resilient_train.protocol.progress import Activity, Progress
from resilient_train.protocol.standing import Phase

_MS = 1_000_000
_WARM_UPDATES = 3
"""Updates after a start or a recovery in which things are built, compiled and touched for the first time."""
_STEPS_MIN = 8
"""So many were timed before anything is said to be usual."""
_SAMPLES_MAX = 512


class RunState(enum.StrEnum):
    """What the operating system says of a rank's process."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"


class Limits(msgspec.Struct, frozen=True):
    """``fixed_ms``: the limit whatever the steps take; 0 for the adaptive one."""

    floor_ms: int = 60_000
    fixed_ms: int = 0
    together_ms: int = 600_000
    stopped_min_ms: int = 100
    """A stopped process is not given up before; twice the slowest usual step may be much longer."""
    apart_ms: int = 3_000
    """Time for an error of the collective, which tells more, to come out, and for what all ranks do to be written."""
    apart_suspect_ms: int = 500
    stopped_unknown_ms: int = 2_000
    """The same, while the job has not made enough steps to know what is usual."""


class Suspicion(enum.StrEnum):
    """What a hang watch should do about ``Stall.ranks``."""

    BEHIND = "behind"
    SUSPECT = "suspect"
    HUNG = "hung"
    TOGETHER = "together"


class Stall(msgspec.Struct, frozen=True):
    """``ranks`` hold the others up (empty for TOGETHER); ``limit_ms`` is when they are given up. ``stopped``: because
    their processes are (SIGSTOP).
    """

    verdict: Suspicion
    ranks: tuple[int, ...]
    stalled_ms: int
    limit_ms: int
    why: str
    stopped: bool = False

    def detail(self) -> dict[str, object]:
        """For its event."""
        told = {"why": self.why, "stalled_ms": self.stalled_ms, "limit_ms": self.limit_ms}
        return {"ranks": list(self.ranks), **told}


class StoppedLooks:
    """In how many looks in a row each rank's process was stopped."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}

    def clear(self) -> None:
        """As if nobody had looked."""
        self._looks.clear()

    def see(self, stopped: Iterable[int]) -> None:
        """One look: all others run."""
        self._looks = {rank: self._looks.get(rank, 0) + 1 for rank in stopped}

    def seen(self) -> list[int]:
        """Those that were stopped when they were looked at last."""
        return list(self._looks)

    def due(self, looks: int) -> list[int]:
        """Those that were stopped in so many; nobody while another was in fewer.

        One hand stops several one after the other, and a look may come in between. They have to be named together: a
        rank may be killed where another one is left that has its state, and that must not be the next to be named.
        """
        return list(self._looks) if min(self._looks.values(), default=0) >= looks else []


class HangDetector:
    """``observe`` is called every few milliseconds. Each finding comes once in a stall."""

    def __init__(self, world_size: int, limits: Limits) -> None:
        self._world_size = world_size
        self._limits = limits
        self._steps_ms: deque[float] = deque(maxlen=_SAMPLES_MAX)
        self._ordered: list[float] = []
        self._timed = 0
        self._resumed = False
        self.restart(0)

    def restart(self, now_ns: int) -> None:
        """The job begins, or goes on after a recovery. What is known of its steps stays known."""
        self._last: list[Progress] = []
        self._moved_ns = now_ns
        self._commit_ns = now_ns
        self._commits = -1
        self._warm = 0
        self._excused = True
        self._told: set[Suspicion] = set()
        self._stopped = StoppedLooks()
        self._ran_ns: dict[int, int] = {}
        """When each rank was seen last to run, while nothing moved."""

    def again(self, now_ns: int) -> None:
        """All compute a window once more, and nothing has happened to anybody."""
        self._moved_ns = now_ns
        self._excused = True
        self._told.clear()
        self._stopped.clear()

    def resume(self) -> None:
        """Nobody has run for a while, and somebody does again: until all have made a step, also over a recovery."""
        self._resumed = self._excused = True

    def observe(self, now_ns: int, ranks: Sequence[Progress], state: Callable[[int], RunState]) -> Stall | None:
        """``state`` is asked only when nothing moves."""
        assert len(ranks) == self._world_size
        if list(ranks) != self._last:
            self._last = list(ranks)
            self._move(now_ns, min(each.commits for each in ranks))
            return None
        stalled_ms = (now_ns - self._moved_ns) / _MS
        if stalled_ms < self._limits.stopped_min_ms:
            return None
        if any(each.activity is Activity.SLOW for each in ranks):
            self._excuse(now_ns)
            return None
        return self._judge(now_ns, stalled_ms, [state(rank) for rank in range(self._world_size)])

    def _move(self, now_ns: int, commits: int) -> None:
        self._moved_ns = now_ns
        self._told.clear()
        self._stopped.clear()
        if any(each.activity is Activity.SLOW for each in self._last):
            self._excused = True
        if commits <= self._commits:
            return
        if self._commits >= 0:
            steps = commits - self._commits  # short ones: many between two looks, which then are one sample
            if not self._excused:
                self._steps_ms.append((now_ns - self._commit_ns) / _MS / steps)
                self._timed += steps
                self._ordered = []
            self._warm += steps
            self._resumed = False  # every rank has made a step
            self._excused = self._warm < _WARM_UPDATES
        self._commits, self._commit_ns = commits, now_ns

    def _excuse(self, now_ns: int) -> None:
        self._moved_ns = now_ns
        self._excused = True

    def _judge(self, now_ns: int, stalled_ms: float, states: list[RunState]) -> Stall | None:
        if RunState.TRACED in states:
            self._excuse(now_ns)
            return None
        self._stopped.see([rank for rank, each in enumerate(states) if each is RunState.STOPPED])
        self._ran_ns |= {rank: now_ns for rank, each in enumerate(states) if each is not RunState.STOPPED}
        limit_ms = self.stopped_ms()
        # Seen twice: a process may be stopped for a moment (a checkpoint of it is taken, its group is signalled).
        surely = frozenset(self._stopped.due(looks=2))
        # One that was waiting for others is stopped since then only.
        since_ns = max([self._moved_ns, *(self._ran_ns.get(rank, 0) for rank in surely)])
        stopped_ms = (now_ns - since_ns) / _MS
        if surely and stopped_ms >= limit_ms:
            found = self._find(Suspicion.HUNG, surely, stopped_ms, limit_ms, "its process is stopped (SIGSTOP)")
            return found and msgspec.structs.replace(found, stopped=True)
        if stalled_ms >= self._limits.apart_suspect_ms and (apart := self._apart()):
            limit_ms = self._limits.apart_ms
            verdict = Suspicion.HUNG if stalled_ms >= limit_ms else Suspicion.SUSPECT
            return self._find(verdict, apart[0], stalled_ms, limit_ms, apart[1])
        return self._find_behind(stalled_ms)

    def _apart(self) -> tuple[frozenset[int], str] | None:
        """Where ranks wait to update, and have left out a collective of the window that others are in: who is wrong of
        both, and why. Nobody can tell whether those are one too few or one too many, so it is those who are fewer.
        """
        for there in dict.fromkeys(each for each in self._last if each.phase is Phase.COMPUTE):
            waits = there._replace(phase=Phase.READY)
            without = [
                rank
                for rank, here in enumerate(self._last)
                if here.collectives < there.collectives and here._replace(collectives=there.collectives) == waits
            ]
            if without:
                inside = [rank for rank, here in enumerate(self._last) if here == there]
                few, other = (inside, without[0]) if len(inside) < len(without) else (without, inside[0])
                why = f"it {self._last[few[0]].describe()}, and rank {other} {self._last[other].describe()}"
                return frozenset(few), f"{why}: these never meet"
        return None

    def _find_behind(self, stalled_ms: float) -> Stall | None:
        least = min(each.place() for each in self._last)
        behind = frozenset(rank for rank, each in enumerate(self._last) if each.place() == least)
        together = len(behind) == self._world_size
        limit_ms = self._together_ms() if together else self._limit_ms()
        if together:
            if stalled_ms < limit_ms:
                return None
            why = f"all ranks {self._last[0].describe()}, and none of them goes on"
            return self._find(Suspicion.TOGETHER, frozenset(), stalled_ms, limit_ms, why)
        why = f"it {self._last[min(behind)].describe()}; the others wait for it"
        if stalled_ms >= limit_ms:
            return self._find(Suspicion.HUNG, behind, stalled_ms, limit_ms, why)
        if stalled_ms >= limit_ms / 2:
            return self._find(Suspicion.SUSPECT, behind, stalled_ms, limit_ms, why)
        if self._timed >= _STEPS_MIN and stalled_ms >= max(5 * self._percentile(0.5), 1000):
            return self._find(Suspicion.BEHIND, behind, stalled_ms, limit_ms, why)
        return None

    def _find(
        self, verdict: Suspicion, ranks: frozenset[int], stalled_ms: float, limit_ms: float, why: str
    ) -> Stall | None:
        if verdict in self._told:
            return None
        self._told.add(verdict)
        return Stall(verdict, tuple(sorted(ranks)), int(stalled_ms), int(limit_ms), why)

    # -- limits

    def usual_ms(self) -> float:
        """What a step takes, as a rule: the median; 0 where no step was timed."""
        return self._percentile(0.5) if self._steps_ms else 0

    def stopped_ms(self) -> float:
        """How long a rank's process may be stopped (SIGSTOP), in a step or in a recovery."""
        if self._timed < _STEPS_MIN:
            return self._limits.stopped_unknown_ms
        least_ms = self._limits.stopped_unknown_ms if self._resumed else self._limits.stopped_min_ms
        return max(2 * self._percentile(0.99), least_ms)

    def leave_limit_ms(self) -> int:
        """How long a rank may go on with its step while a recovery waits for it: as in a step that nothing disturbs, or
        what all others wait for in each step (rank 0 evaluates) would cost it its life there. It is not longer where no
        steps are known: the next ones are only timed when it has come.
        """
        known_ms = 10 * self._percentile(0.99) if self._timed >= _STEPS_MIN else 0
        return self._limits.fixed_ms or int(max(known_ms, self._limits.floor_ms))

    def _limit_ms(self) -> float:
        if self._limits.fixed_ms:
            return self._limits.fixed_ms
        if self._timed < _STEPS_MIN or self._warm < _WARM_UPDATES:
            return self._limits.together_ms
        return max(10 * self._percentile(0.99), self._limits.floor_ms)

    def _together_ms(self) -> float:
        if self._limits.fixed_ms:
            return 10 * self._limits.fixed_ms
        return max(self._limits.together_ms, self._limit_ms())

    def _percentile(self, share: float) -> float:
        if not self._ordered:
            self._ordered = sorted(self._steps_ms)
        return self._ordered[min(len(self._ordered) - 1, int(share * len(self._ordered)))]
