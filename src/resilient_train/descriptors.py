"""How many descriptors a process may have: the agent and the holder take all that there are, ranks what the user has
set.

``select`` breaks above 1,024, so that is where many systems put the usual limit; a program of the user's may rely on
it.
"""

from __future__ import annotations

import contextlib
import resource

Limit = tuple[int, int]
"""Soft and hard, as in ``resource``."""


def raise_limit() -> Limit:
    """Raises this process's own to the hard limit. Returns what it was, for ``restore_limit`` in children."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # "unlimited" may be more than the kernel gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    return before


def restore_limit(before: Limit) -> None:
    """For a new process, before it runs anything of the user's."""
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
