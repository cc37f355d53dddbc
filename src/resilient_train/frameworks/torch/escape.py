"""Works that can always be left.

gloo can forget a waiting thread: when its event loop pops a pending send and the write then fails (the peer was killed
a moment ago), the error is kept on the connection but no longer reaches the buffer, and the collective sleeps for the
group's whole time-out, half an hour by default. No signal and no ``abort()`` ends that sleep (``docs/facts.md``).

So nobody waits on gloo itself. The caller of a collective gets a ``GuardedWork`` on a future of ours, which is
completed by gloo's own future or, after a stop, by ``release``. The forgotten thread of gloo stays behind with its
group.
"""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_POLL_S = 0.0005


class _Failure:
    """An error on its way through a future; a future of torch's completes with a value only."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _open(gate: torch.futures.Future[Any]) -> Any:
    value = gate.value()
    if type(value) is _Failure:
        raise value.error
    return value


class GuardedWork(dist.Work):
    """A work whose ``wait`` and future end when the inner work ends, or when somebody lets the waiters go."""

    def __init__(self, inner: dist.Work, outcome: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._inner = inner
        self._outcome = outcome

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
        self._numbers = itertools.count()
        self._live: dict[int, torch.futures.Future[Any]] = {}

    def guard(self, inner: dist.Work) -> GuardedWork:
        """The work, so that its waiters can be let go."""
        gate: torch.futures.Future[Any] = torch.futures.Future()
        outcome = gate.then(_open)
        number = next(self._numbers)
        self._live[number] = gate

        def finish(future: torch.futures.Future[Any]) -> None:
            try:
                value = future.value()
            except RuntimeError as error:
                value = _Failure(error)
            # Taking the gate out of the dict decides, in one step under the GIL, who completes it.
            if self._live.pop(number, None) is not None:
                gate.set_result(value)

        inner.get_future().add_done_callback(finish)
        return GuardedWork(inner, outcome)

    def drain(self, timeout_s: float) -> int:
        """Waits until no work is under way: until then gloo may write into gradients. Returns how many were let go."""
        deadline = time.monotonic() + timeout_s
        while self._live and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.release()

    def release(self) -> int:
        """Lets all waiters go with an error. May be called on any thread. Returns how many there were."""
        released = 0
        for number in list(self._live):
            gate = self._live.pop(number, None)
            if gate is not None:
                gate.set_result(_Failure(RuntimeError("the collective was given up: a recovery is under way")))
                released += 1
        return released
