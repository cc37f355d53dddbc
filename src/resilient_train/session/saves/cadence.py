"""When all ranks save, without a message: rank 0 decides, one window ahead, and says so in the board.

At the head of window c rank 0 announces what window c + 1 begins with; each rank looks at the head of its window c + 1.
Between the two lies the barrier of update c, so nobody looks too early. The word is used again for window c + 3, by a
rank 0 that has passed the barrier of update c + 1, which nobody reaches before it has looked: nobody looks too late.
A rank that replaces another one finds the same words.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from resilient_train.errors import ConfigError
from resilient_train.session.peers import Peers
from resilient_train.session.saves.save_cost import Meter


class Due(enum.IntEnum):
    """What a window begins with."""

    NOTHING = 0
    MEMORY = 1
    """A snapshot that stays in memory."""
    STORAGE = 2
    """A snapshot that goes to storage as well. Replicas compare before it is written."""


class Wish(msgspec.Struct, frozen=True):
    """How often to save. One of ``steps``, ``seconds`` and ``auto`` is given, or ``memory_steps`` alone."""

    steps: int = 0
    """0 beside ``memory_steps``: nothing goes to storage."""
    memory_steps: int = 0
    """0: no snapshots but those that go to storage."""
    seconds: float = 0.0
    auto: bool = False


def wish(mode: str | None, steps: int | None, seconds: float | None, memory_steps: int | None) -> Wish:
    """What ``save_every`` was given. Raises ConfigError for what can't be."""
    if mode not in {None, "auto"}:
        raise ConfigError(f'save_every({mode!r}): the only word is "auto"; write steps=, seconds= or "auto"')
    if sum(each is not None for each in (mode, steps, seconds)) != 1:
        raise ConfigError('save_every: give exactly one of steps=, seconds= and "auto"')
    if steps is not None and steps < 1:
        raise ConfigError(f"save_every(steps={steps}): it must be 1 or more")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"save_every(seconds={seconds}): it must be a number above 0")
    if memory_steps is not None and (steps is None or memory_steps < 1 or steps % memory_steps):
        raise ConfigError(
            f"save_every(memory_steps={memory_steps}): it goes with steps=, of which it must be a divisor: each save "
            "to storage is one of those in memory"
        )
    return Wish(steps or 0, memory_steps or 0, seconds or 0.0, mode is not None)


class Rhythm(Protocol):
    """Decides, on rank 0. Times are seconds of one monotonic clock."""

    strict: bool
    """What is due and can't be done is left out, and told; else it waits."""

    def choose(self, commits: int, now_s: float, *, busy: bool) -> Due:
        """What is due at window ``commits``, the one after that which begins now. ``busy``: storage is."""
        ...

    def chosen(self, commits: int, due: Due, now_s: float) -> None:
        """That window will begin with it."""
        ...


class BySteps:
    """Every so many updates. ``steps`` is 0: none goes to storage."""

    strict = True

    def __init__(self, steps: int, memory_steps: int = 0) -> None:
        self._steps = steps
        self._memory_steps = memory_steps or steps

    def choose(self, commits: int, now_s: float, *, busy: bool) -> Due:  # noqa: ARG002 - a Rhythm is asked so
        if self._steps and commits % self._steps == 0:
            return Due.STORAGE
        return Due.NOTHING if commits % self._memory_steps else Due.MEMORY

    def chosen(self, commits: int, due: Due, now_s: float) -> None:
        pass


class BySeconds:
    """At the head of the window that begins nearest to so many seconds after the save before."""

    strict = False

    def __init__(self, seconds: float, now_s: float) -> None:
        self._seconds = seconds
        self._last_s = self._before_s = now_s
        self._window_s = 0.0

    def choose(self, commits: int, now_s: float, *, busy: bool) -> Due:  # noqa: ARG002 - likewise
        self._window_s, self._before_s = now_s - self._before_s, now_s
        # The window after this one begins in about as long as the last one took; the next chance is one more away.
        wait_s = self._last_s + self._seconds - (now_s + self._window_s)
        return Due.STORAGE if not busy and wait_s <= self._window_s / 2 else Due.NOTHING

    def chosen(self, commits: int, due: Due, now_s: float) -> None:  # noqa: ARG002 - likewise
        self._last_s = now_s + self._window_s


class Cadence:
    """What the windows of one rank begin with. ``rhythm`` and ``meter``: rank 0's, None on all others."""

    def __init__(
        self,
        peers: Peers,
        rhythm: Rhythm | None,
        meter: Meter | None,
        skip: Callable[[int, str], None],
    ) -> None:
        """``skip`` tells that what is due at an update is left out, and why."""
        self._peers = peers
        self._rhythm = rhythm
        self._meter = meter
        self._skip = skip
        self._generation = peers.stop_generation
        self._unsettled: list[int] = []
        """Before which updates the checkpoints were taken that are on their way to storage."""
        self._meanwhile = 0
        """Snapshots since the first of them."""

    def head(self, commits: int) -> Due:
        """A window begins: what with."""
        if self._rhythm is not None and self._meter is not None:
            self._lead(commits + 1, self._rhythm, self._meter)
        due = Due(self._peers.announced(commits))
        if due in (Due.MEMORY, Due.STORAGE) and self._meter is not None:
            self._meter.begun(commits, time.monotonic(), stored=due is Due.STORAGE)
        return due

    def waited(self, duration_s: float) -> None:
        """The training thread waited for a snapshot, or was busy with one."""
        if self._meter is not None:
            self._meter.waited(duration_s)

    def _lead(self, upcoming: int, rhythm: Rhythm, meter: Meter) -> None:
        now_s = time.monotonic()
        self._look(now_s, meter)
        due = rhythm.choose(upcoming, now_s, busy=bool(self._unsettled))
        # What only begins now may be over by then.
        if self._unsettled and self._unsettled[0] < upcoming - 1 and due is not Due.NOTHING:
            if due is Due.STORAGE and rhythm.strict:
                self._skip(upcoming, "storage is still busy with the last one")
            # One of a rank's two slots is being read, for an unknown time. The other one takes one more snapshot, and
            # then holds the newest that all have: a second one would find no room.
            due = Due.NOTHING if self._meanwhile else Due.MEMORY
        if due is Due.NOTHING:
            return
        self._peers.announce(upcoming, due)
        rhythm.chosen(upcoming, due, now_s)
        self._meanwhile += bool(self._unsettled)
        if due is Due.STORAGE:
            self._unsettled.append(upcoming)

    def _look(self, now_s: float, meter: Meter) -> None:
        """What has come of the saves before."""
        generation, settled = self._peers.stop_generation, self._peers.settled
        whole = generation == self._generation
        self._generation = generation
        meter.head(now_s, whole=whole)
        # A rank that was lost may have taken its word that its part is complete along: nobody waits for that.
        left = [each for each in self._unsettled if each > settled] if whole else []
        if self._unsettled and not left:
            meter.ended(now_s, measured=whole)
            self._meanwhile = 0
        self._unsettled = left
