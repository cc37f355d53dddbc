"""All members of a process group in one process: a reduction as the library itself adds it up, without the members.

gloo's result depends on the number of members and on nothing else of them: n groups on n threads of one process, with
the members' inputs, give bit for bit what n processes got (``tests/process/test_clique.py``).
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from resilient_train.errors import UsageError
from resilient_train.frameworks.torch.communication.process_group import drop
from resilient_train.frameworks.torch.communication.transports.gloo import sockets, stock_group

_TIMEOUT = timedelta(days=30)
"""Nobody else can keep a member waiting: all are threads of this process. But it may be stopped meanwhile, for long:
an error for that would be taken for the user's own.
"""
_FILES_EACH = 8
"""Of a member beside its connections, amply."""
_USERS_FILES = 300
"""That may be open beside sockets, or be opened meanwhile."""


class Clique:
    """``size`` members. Made for one tail; ``close`` frees the threads and sockets."""

    def __init__(self, size: int) -> None:
        """Raises UsageError if the process may not open as many files."""
        _allow_files(len(sockets()) + size * (size + _FILES_EACH))
        store = HashStore()
        groups: list[Any] = [None] * size

        def build(member: int) -> None:
            groups[member] = stock_group(store, member, size, _TIMEOUT)

        _on_threads(build, size)
        self._groups: list[dist.ProcessGroup] = groups

    def run(self, verb: str, calls: Sequence[Sequence[Any]]) -> None:
        """Runs ``verb`` with each member's arguments, which are filled as the members' own would be."""

        def call(member: int) -> None:
            with torch.no_grad():
                getattr(self._groups[member], verb)(*calls[member]).wait()

        _on_threads(call, len(self._groups))

    def close(self) -> None:
        """Lets the groups go; another thread waits for theirs."""
        groups, self._groups = self._groups, []
        drop(groups)


def _allow_files(count: int) -> None:
    """Too many would end the process, in a thread of gloo's. The limit stays: nobody knows when the last is closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count + _USERS_FILES:
        wanted = count + _USERS_FILES
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise UsageError(f"this process may not open {wanted} files (ulimit -Hn is {hard})")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _on_threads(work: Callable[[int], None], count: int) -> None:
    errors: list[BaseException] = []

    def guarded(member: int) -> None:
        try:
            work(member)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(member,), daemon=True) for member in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
