"""How many descriptors a process may have: the agent and the holder take all that there are, ranks what the user has
set, but for recoveries.

``select`` breaks above 1,024, so that is where many systems put the usual limit; a program of the user's may rely on
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource

Limit = tuple[int, int]
"""Soft and hard, as in ``resource``."""
_USERS_FILES = 64
"""That may be opened right behind a recovery."""
_CLOSE_RANGE, _CLOSE_RANGE_UNSHARE = 436, 2
"""Of Linux 5.9, with the same number on all machines; its flag."""
_LAST = (1 << 32) - 1


def raise_limit() -> Limit:
    """Raises this process's own to the hard limit. Returns what it was, for ``restore_limit`` in children."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # "unlimited" may be more than the kernel gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    return before


def restore_limit(before: Limit) -> None:
    """For a new process, before it runs anything of the user's."""
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def keep_alone(descriptor: int) -> bool:
    """This thread, and those that it makes, get descriptors of their own: copies of this one and the standard streams.
    From then on nothing that it closes is closed for others. The process's limit counts for each by itself.

    False: the kernel does not do it, and all are shared as before.
    """
    # Not `unshare`: containers forbid it as a rule.
    call = ctypes.CDLL(None, use_errno=True).syscall
    behind = max(descriptor, 2) + 1
    numbers = (ctypes.c_uint(behind), ctypes.c_uint(_LAST), ctypes.c_uint(_CLOSE_RANGE_UNSHARE))
    if call(ctypes.c_long(_CLOSE_RANGE), *numbers) != 0:
        return False
    os.closerange(3, descriptor)
    return True


class RecoveryLimit:
    """All that there are while a rank recovers: groups of earlier generations are freed on other threads, so that
    several hold sockets at once, and a job that has few would be lost for it.
    """

    def __init__(self) -> None:
        self._before: Limit | None = None

    def lift(self) -> None:
        """A recovery begins, or goes on."""
        if self._before is None:
            self._before = raise_limit()

    def lower(self) -> None:
        """The thread goes back to the user, and the limit to theirs; or to more, as long as old groups hold much of it.
        One that somebody has set meanwhile stays.
        """
        if self._before is None:
            return
        soft, hard = self._before
        if resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard):
            restore_limit((min(hard, max(soft, len(_open()) + _USERS_FILES)), hard))
        self._before = None


def _open() -> list[str]:
    return os.listdir("/proc/self/fd")  # noqa: PTH208 - names are what is wanted
