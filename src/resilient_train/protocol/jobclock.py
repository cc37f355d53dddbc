"""The time in which a job could have gone on: it stands still while none of its ranks runs, or the agent did not.

All ranks paused together is nobody's fault: a virtual machine that is moved, a laptop's lid, a frozen container,
SIGSTOP to all. Nobody runs if every rank's process is stopped, or if no rank's native thread has beaten for a while.
Whatever limits the patience with ranks is counted by this clock, so that no limit passes meanwhile. The agent may have
been paused with them, and go on first: a jump of its own clock does not count either.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from resilient_train.protocol.hang import RunState

_MS = 1_000_000
_JUMP_NS = 1_000 * _MS
"""Between two looks, which should be some 50 ms apart. More, and the agent itself did not run."""
_SILENCE_BEATS = 10
_SILENCE_MIN_NS = 500 * _MS


class JobClock:
    """``tick`` is called at every look. ``now_ns`` is the job's time, from 0."""

    def __init__(self, world_size: int, beat_ms: int) -> None:
        self.now_ns = 0
        self.paused_ns = 0
        """How long nobody has run by now; 0 while somebody does."""
        self._world_size = world_size
        self._silence_ns = max(_SILENCE_BEATS * beat_ms * _MS, _SILENCE_MIN_NS)
        self._last_ns = -1
        self._signs: Hashable = None
        self._silent_ns = 0

    def tick(self, time_ns: int, signs: Hashable, state: Callable[[int], RunState]) -> None:
        """``signs``: whatever changes while any rank runs. ``state`` is asked only when they have not changed."""
        elapsed_ns = time_ns - self._last_ns if self._last_ns >= 0 else 0
        self._last_ns = time_ns
        if elapsed_ns > _JUMP_NS:
            self._silent_ns = 0
            return
        if signs != self._signs:
            self._signs, self._silent_ns, self.paused_ns = signs, 0, 0
        else:
            self._silent_ns += elapsed_ns
        if self._silent_ns and (self._silent_ns > self._silence_ns or self._all_stopped(state)):
            self.paused_ns += elapsed_ns
        else:
            self.now_ns += elapsed_ns

    def _all_stopped(self, state: Callable[[int], RunState]) -> bool:
        return all(state(rank) is RunState.STOPPED for rank in range(self._world_size))
