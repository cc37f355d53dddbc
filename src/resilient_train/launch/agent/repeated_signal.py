"""One request to end a job may come as several signals."""

from __future__ import annotations

import time

from resilient_train.launch.exit_codes import EXIT_SAVED

_WITHIN_S = 1.0


class RepeatedSignal:
    """Who ends a job (systemd, LSF) may signal all of its processes: the launcher and a rank hear of it one behind the
    other. And ``timeout`` signals its child, and then the group, in which that is as well.
    """

    def __init__(self) -> None:
        self._number, self._when_s = 0, 0.0

    def is_one(self, number: int) -> bool:
        """Whether ``number`` belongs to the request before."""
        now_s = time.monotonic()
        if number == self._number and number in EXIT_SAVED and now_s - self._when_s < _WITHIN_S:
            return True
        self._number, self._when_s = number, now_s
        return False
