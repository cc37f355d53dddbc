"""What an agent wants of its event loop: signals, and work in the background that does not fail unseen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any


def add_signal_handlers(names: Sequence[str], handle: Callable[[int], None]) -> None:
    """Has those signals handled by the running loop, and SIGUSR1, which schedulers send before a time limit."""
    loop = asyncio.get_running_loop()
    for number in {signal.SIGUSR1, *(getattr(signal, name) for name in names)}:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup has asked for that
            loop.add_signal_handler(number, handle, number)


class BackgroundTasks:
    """Tasks that nobody awaits. An exception that ends one goes to the loop's handler, like one in a callback."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins the work, in the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_over)
        return task

    def _on_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": "a task has failed", "exception": error})
