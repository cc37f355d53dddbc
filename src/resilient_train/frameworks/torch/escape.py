"""Works that can always be left.

gloo can forget a waiting thread: when its event loop pops a pending send and the write then fails (the peer was killed
a moment ago), the error is kept on the connection but no longer reaches the buffer, and the collective sleeps for the
group's whole time-out, half an hour by default. No signal and no ``abort()`` ends that sleep (``docs/facts.md``).

So nobody waits on gloo itself. The caller of a collective gets a ``GuardedWork`` on a future of ours, which is
completed by gloo's own future or, after a stop, by ``release``. The forgotten thread of gloo stays behind with its
group.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_POLL_S = 0.0005


class GuardedWork(dist.Work):
    """A work whose ``wait`` and future end when the inner work ends, or when somebody lets the waiters go.

    A future of torch's completes with a value only; an error has to be raised by a callback, behind a *gate*.
    """

    def __init__(self, inner: dist.Work, live: dict[int, GuardedWork]) -> None:
        super().__init__()
        self._inner = inner
        self._live = live
        self._value: Any = None
        self._error: BaseException | None = None
        self.succeeded = False
        self._gate: torch.futures.Future[None] = torch.futures.Future()
        self._outcome: torch.futures.Future[Any] = self._gate.then(self._open)
        live[id(self)] = self
        inner.get_future().add_done_callback(self._inner_ended)

    def _open(self, _gate: torch.futures.Future[None]) -> Any:
        value, self._value = self._value, None
        if self._error is not None:
            raise self._error
        return value

    def _inner_ended(self, future: torch.futures.Future[Any]) -> None:
        try:
            self._end(future.value(), None)
        except RuntimeError as error:
            self._end(None, error)

    def give_up(self) -> bool:
        """Lets the waiters go with an error. False: the work has ended already."""
        return self._end(None, RuntimeError("the collective was given up: a recovery is under way"))

    def _end(self, value: Any, error: BaseException | None) -> bool:
        # Taking the work out of the dict decides, in one step under the GIL, who completes it.
        if self._live.pop(id(self), None) is None:
            return False
        self._value, self._error, self.succeeded = value, error, error is None
        self._gate.set_result(None)
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - gloo's own time-out covers it
        self._outcome.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._outcome

    def is_completed(self) -> bool:
        return bool(self._outcome.done())

    def result(self) -> Any:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def synchronize(self) -> None:
        self.wait()


class Escape:
    """All works under way in this process."""

    def __init__(self) -> None:
        self._live: dict[int, GuardedWork] = {}

    def guard(self, inner: dist.Work) -> GuardedWork:
        """The work, so that its waiters can be let go."""
        return GuardedWork(inner, self._live)

    def drain(self, timeout_s: float) -> int:
        """Waits until no work is under way: until then gloo may write into gradients. Returns how many were let go."""
        deadline = time.monotonic() + timeout_s
        while self._live and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.release()

    def release(self) -> int:
        """Lets all waiters go with an error. May be called on any thread. Returns how many there were."""
        return sum(work.give_up() for work in list(self._live.values()))
