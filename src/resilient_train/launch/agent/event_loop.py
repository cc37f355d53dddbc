"""What an agent wants of its event loop: signals to the very end, work in the background that does not fail unseen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVarTuple

_Ts = TypeVarTuple("_Ts")


class AgentLoop(asyncio.SelectorEventLoop):
    """A loop whose signals are ignored once it is closed.

    asyncio gives them their defaults back: a second SIGTERM would end the launcher, with a code of its own, while it
    tells how the job has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handled: set[int] = set()

    def add_signal_handler(self, sig: int, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        self._handled.add(sig)
        super().add_signal_handler(sig, callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        signal.signal(sig, signal.SIG_IGN)
        return True

    def close(self) -> None:
        for number in self._handled:
            self.remove_signal_handler(number)
        signal.set_wakeup_fd(-1)  # before the loop closes the other end
        super().close()


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
