"""What a loop of calls does between ``session.position`` and its first call: it may change what is registered.

In the first window of all it changes what the window has found, as code between two bodies does. The windows behind it
begin within a call, so what is copied from a replica, or saved, holds that change already. A process that takes it up
runs the same code once more in front of its own first call, and that is taken back.
"""

from __future__ import annotations

from resilient_train.frameworks.roles import Between, Window
from resilient_train.session.from_replica import FromReplica


class LoopHead:
    """Of one rank. ``attempt``: how often all ranks were started again in this job."""

    def __init__(self, window: Window, between: Between, from_replica: FromReplica, attempt: int) -> None:
        self._window = window
        self._between = between
        self._from_replica = from_replica
        self._attempt = attempt

    def is_in_state(self, commits: int) -> bool:
        """Whether state from before the update behind ``commits`` holds what the loop does in front of that call."""
        first = self._from_replica.loops_begin
        return commits > first.commits or (first.headed and commits == first.commits)

    def begins(self, commits: int) -> None:
        """The loop knows its first step, and its window is open."""
        if self.is_in_state(commits):
            self._window.begin(whole=True)
            self._between.head_is_repeated()
        else:
            self._between.left(-1)

    def ends(self, commits: int) -> str:
        """The first call. Returns what was changed and can't be put back; empty: nothing."""
        if not self.is_in_state(commits):
            self._between.look()
            return ""
        from_file = commits == self._from_replica.loops_begin.commits and self._attempt == 0
        set_modes = self._between.modes() if from_file else None  # no file has them
        lost = self._window.rollback() or self._between.written_in_head()
        if set_modes is not None:
            set_modes()
            self._window.begin()
        return lost
