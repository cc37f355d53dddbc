"""Work that may never return, for the agent's event loop: reading from storage that is gone ends for no signal.

A fork of this process does it and sends its answer through a pipe. Whoever has stopped waiting kills the fork; where
not even that ends it, it is left behind, and nothing waits for it. (A thread would keep the whole process from ending.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from resilient_train import _native

_CHUNK_BYTES = 1 << 16
_REAP_S = 0.01
_REAPS = 100


async def aside(work: Callable[[], bytes]) -> bytes:
    """What ``work`` returns. Raises OSError if its process could not be made, or has ended without an answer."""
    readable, writable = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _work(work, writable)
        pidfd = os.pidfd_open(pid)
    except OSError:
        os.close(readable)
        raise
    finally:
        os.close(writable)
    try:
        answer = await _read(readable)
    finally:
        os.close(readable)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        await _reap(pidfd)
    if not answer:
        raise OSError("the process that was to look ended without an answer")
    return answer[:-1]


async def _read(readable: int) -> bytes:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    data = bytearray()

    def take() -> None:
        piece = os.read(readable, _CHUNK_BYTES)
        data.extend(piece)
        if not piece and not over.done():
            over.set_result(None)

    loop.add_reader(readable, take)
    try:
        await over
    finally:
        loop.remove_reader(readable)
    return bytes(data)


async def _reap(pidfd: int) -> None:
    """Unless somebody else does, or it can't be killed: then it is the agent's stray, or nobody's."""
    try:
        for _ in range(_REAPS):
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG) is None:  # noqa: ASYNC222
                    await asyncio.sleep(_REAP_S)
                    continue
            return
    finally:
        os.close(pidfd)


def _work(work: Callable[[], bytes], writable: int) -> NoReturn:
    """In the fork: everything of the agent's but memory is let go of first, its lock above all."""
    try:
        _native.die_with_parent(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        for each in Path("/proc/self/fd").iterdir():
            if int(each.name) not in (0, 1, 2, writable):
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(int(each.name))
        answer = memoryview(work() + b".")
        while answer:
            answer = answer[os.write(writable, answer) :]
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        os._exit(0)
