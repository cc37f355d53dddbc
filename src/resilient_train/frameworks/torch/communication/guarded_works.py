"""Works that can always be left.

gloo can forget a waiting thread: when its event loop pops a pending send and the write then fails (the peer was killed
a moment ago), the error is kept on the connection but no longer reaches the buffer, and the collective sleeps for the
group's whole time-out, half an hour by default. No signal and no ``abort()`` ends that sleep (``docs/facts.md``).

So nobody waits on gloo itself. The caller of a collective gets a ``GuardedWork`` on a future of ours, which is
completed by gloo's own future or, after a stop, by ``release``. The forgotten thread of gloo stays behind with its
group. (Completing gloo's own future instead would need no callback, but gloo may be slow instead of forgetful: when its
thread then completes that future once more, torch throws in it and the process ends.)

A ``wait(timeout)`` whose time runs out raises what gloo's raises, and leaves behind what gloo's does: a collective goes
on and may be waited for again; with a message gloo closes all connections of the group. A script that lets it pass, or
goes on without the result, has what depends on the clock. So until somebody has seen the end of it, such a work counts
as one that has failed: there is no update on it, and the window runs again, as after any collective that fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from resilient_train._native import keep_thread_state
from resilient_train.frameworks.torch.communication.gloo_at_rest import COPIES, copies
from resilient_train.frameworks.torch.communication.waits import waits

_POLL_S = 0.0005
_telling = set[object]()
"""One for each work whose waiters hear of its end just now: with all that scripts have hung on it (``then``), which
runs on the thread that tells them, and may write and communicate as long as it likes.
"""
_MS = timedelta(milliseconds=1)


def _limit_s(timeout: timedelta | float | None) -> float | None:
    """As gloo takes it: in whole milliseconds, and none is no limit. Raises TypeError."""
    if timeout is None:
        return None
    whole_ms = int((timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)) / _MS)
    return max(0.0, min(whole_ms / 1000, threading.TIMEOUT_MAX)) if whole_ms else None


class _Cut:
    """Stands for the value of a work that has none.

    A future of torch's can be completed from Python with a value only. A waiter in Python gets the error raised by the
    future; DDP's reducer, which waits in C++, looks for tensors in the value by pickling it, and gets it raised there.

    Each waiter gets an error of its own. One that was raised holds on to the frames that it has passed, they to the
    work, and the work, by way of C++, to this: Python would never find that cycle, and the group's threads would stay.
    """

    def __init__(self, error: BaseException) -> None:
        self._kind, self._arguments = type(error), error.args

    def error(self) -> BaseException:
        return self._kind(*self._arguments)

    def __reduce__(self) -> NoReturn:
        raise self.error()


def _raise_cut(value: Any) -> None:
    if type(value) is _Cut:
        raise value.error()


class GuardedWork(dist.Work):
    """A work whose ``wait`` and future end when the inner work ends, or when somebody lets the waiters go.

    Several are made in each step: hence ``torch._C.Future``, which lacks nothing but the type hints of its subclass.
    """

    def __init__(self, inner: Any, live: dict[int, GuardedWork]) -> None:
        """Raises RuntimeError if the inner work has no future."""
        super().__init__()
        future = inner.get_future()
        self._inner = inner
        self._live = live
        self.ended = False
        """gloo is done with it: it writes into no tensor any more. Its waiters may have been let go before."""
        self.succeeded = False
        self.ran_out = False
        """The time of a wait has run out, and nobody has seen the end since."""
        self._outcome: torch._C.Future[Any] = torch._C.Future([])
        live[id(self)] = self
        future.add_done_callback(self._inner_ended)

    def _inner_ended(self, future: torch.futures.Future[Any]) -> None:
        keep_thread_state()  # gloo's thread comes here once for each collective
        try:
            value = self._value_of(future)
        except Exception as error:  # raised here, nobody would hear of it, and the waiters would wait on
            self._cut(error)
            return
        finally:
            self.ended = True
        self._complete(value, succeeded=True)

    def _value_of(self, future: torch.futures.Future[Any]) -> Any:
        return future.value()

    def give_up(self) -> bool:
        """Lets the waiters go with an error. False: the work has ended already."""
        return self._cut(RuntimeError("the collective was given up: a recovery is under way"))

    def _cut(self, error: BaseException) -> bool:
        return self._complete(_Cut(error), succeeded=False)

    def _complete(self, value: Any, *, succeeded: bool) -> bool:
        """False: somebody else has."""
        mark = object()
        _telling.add(mark)  # first: a drain finds it here, or among those that live
        try:
            # Taking the work out of the dict decides, in one step under the GIL, who completes it.
            if self._live.pop(id(self), None) is None:
                return False
            if succeeded:
                self.succeeded = True
                waits.ended_ns = time.monotonic_ns()
            else:
                # Nobody may ever wait for this one: torch's list of functional collectives keeps it to the end of the
                # process, and with gloo's work a group's threads and descriptors.
                self._inner = None
                self._outcome._set_unwrap_func(_raise_cut)
            self._outcome.set_result(value)
        finally:
            _telling.discard(mark)
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError if it failed, was let go, or ``timeout`` is over: then it is still under way."""
        limit_s = _limit_s(timeout)
        waits.until(self._outcome.wait if limit_s is None else lambda: self._wait_for(limit_s))
        self.ran_out = False
        return True

    def _wait_for(self, limit_s: float) -> None:
        """A future of torch's has no wait with a limit."""
        ended = threading.Event()
        self._outcome.add_done_callback(lambda _: ended.set())
        if not ended.wait(limit_s):
            self.ran_out = True
            raise RuntimeError("Operation timed out!")  # gloo's words
        self._outcome.wait()

    def get_future(self) -> Any:
        return self._outcome

    def is_completed(self) -> bool:
        ended = bool(self._outcome.done())
        self.ran_out = self.ran_out and not ended
        return ended

    def intact(self) -> bool:
        """Whether it succeeded, which is waited for."""
        if self.ran_out:
            return False
        if not self.succeeded:
            try:
                self.wait()
            except RuntimeError:
                return False
        return True

    def result(self) -> Any:
        if self.is_completed():
            self._completed().wait()  # gloo completes the future first, and says a moment later that the work is over
        return self._completed().result()

    def source_rank(self) -> int:
        return int(self._completed().source_rank())

    def _completed(self) -> Any:
        inner = self._inner
        if inner is None:
            self.wait()
        return inner

    def synchronize(self) -> None:
        self.wait()


class KeptWork(GuardedWork):
    """A work whose result is taken before anybody hears that it has ended: then it may be changed."""

    def __init__(self, inner: dist.Work, live: dict[int, GuardedWork], take: Callable[[], None]) -> None:
        """Raises RuntimeError if the inner work has no future."""
        self._take = take
        super().__init__(inner, live)

    def _value_of(self, future: torch.futures.Future[Any]) -> Any:
        value = super()._value_of(future)
        self._take()
        return value


class ScatteredWork(GuardedWork):
    """Of a reduce-scatter, for which gloo has no future; nor does it take notice of the limit of a ``wait``."""

    def __init__(self, inner: Any, live: dict[int, GuardedWork]) -> None:
        super().__init__(InThread(inner), live)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - see above
        return super().wait()


class NotBegun:
    """Stands for the work of a call that a fault has not let begin."""

    def intact(self) -> bool:
        return False


class InThread:
    """Gives a future to a work that has none: another thread waits for it, ``limit_s`` at most."""

    def __init__(self, work: Any, limit_s: float | None = None) -> None:
        self._work = work
        self._limit = () if limit_s is None else (timedelta(seconds=limit_s),)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        threading.Thread(target=self._wait, args=(future,), name=COPIES, daemon=True).start()
        return future

    def _wait(self, future: torch.futures.Future[Any]) -> None:
        work, self._work = self._work, None  # nobody else keeps what gloo may have forgotten
        copies()  # torch has the result of a reduce-scatter copied by who waits for it
        try:
            work.wait(*self._limit)
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result([])


class MonitoredBarrier:
    """gloo's monitored barrier, which runs while it is waited for, as a work."""

    def __init__(self, group: Any, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        self._group, self._timeout, self._wait_all_ranks = group, timeout, wait_all_ranks

    def wait(self) -> None:
        self._group.monitored_barrier(self._timeout, self._wait_all_ranks)


class GuardedMessage(dist.Work):
    """One message from a rank to another. gloo's work for it has no future and may be waited for once only."""

    def __init__(self, inner: Any, works: Works, source: int, *, receives: bool = False) -> None:
        """``receives``: gloo writes into a tensor, whether somebody waits for it or not."""
        super().__init__()
        self._inner: Any = inner
        self._works = works
        self._source = source
        self._posted = object()
        if receives:
            works.posted.add(self._posted)
        self._error: RuntimeError | None = None
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError if it failed, ``timeout`` is over, or it was let go; again, if it is asked again."""
        if self._inner is not None:
            inner, self._inner = self._inner, None
            work = GuardedWork(InThread(inner, _limit_s(timeout)), self._works.live)
            self._works.posted.discard(self._posted)  # behind it: a drain finds it here or there
            try:
                work.wait()
            except RuntimeError as error:
                self._error = RuntimeError(*error.args)
                self._works.since_update.append(self)
                raise
            if self._source < 0:
                self._source = inner.source_rank()
            self._done = True
        elif self._error is not None:
            raise RuntimeError(*self._error.args)
        return True

    def is_completed(self) -> bool:
        return self._done

    def intact(self) -> bool:
        """Whether it has not failed."""
        return self._error is None

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank  # torch's own recv() asks for this one

    def synchronize(self) -> None:
        self.wait()


class Works:
    """All works under way in this process, and those of the bodies since the last update."""

    def __init__(self) -> None:
        self.live: dict[int, GuardedWork] = {}
        """By id; a work takes itself out when it ends. Another one behind each ``drain``."""
        self.posted = set[object]()
        """Receives that nobody waits for yet, or ever: nobody hears of their end."""
        self._let_go: list[GuardedWork] = []
        """In this recovery: they fail, whatever gloo still makes of them."""
        self.since_update: list[GuardedWork | GuardedMessage | NotBegun] = []
        """The collectives that bodies have begun since the last update, also if they have ended, the messages that have
        failed, and the calls that a fault has not let begin: the next one needs them all intact.
        """

    def ran_out(self) -> bool:
        """Whether somebody has not waited long enough for one of them."""
        return any(isinstance(work, GuardedWork) and work.ran_out for work in self.since_update)

    def refused(self) -> bool:
        """Whether a fault has not let one of them begin."""
        return any(isinstance(work, NotBegun) for work in self.since_update)

    def drain(self, at_rest: Callable[[], bool]) -> int:
        """Waits until no work is under way, or none of them goes on: until then gloo may write into gradients, also for
        a work whose waiters were let go. Who hears of an end is waited for in any case. Returns how many it lets go.
        """
        released = 0
        while self._under_way():
            if at_rest():
                released += self.release()  # what hears of one end may wait for another
                if not _telling:
                    break
            time.sleep(_POLL_S)
        released += self.release()
        self._let_go.clear()  # nobody else keeps what gloo may have forgotten
        self.live, self.posted = {}, set()
        return released

    def _under_way(self) -> bool:
        return bool(self.live or self.posted or _telling) or not all(work.ended for work in self._let_go)

    def release(self, at_rest: Callable[[], bool] | None = None, live: dict[int, GuardedWork] | None = None) -> int:
        """Lets all waiters go with an error. May be called on any thread. Returns how many there were. ``at_rest``: if
        gloo does nothing more for those who wait now, else nobody. ``live``: of before a drain, which may be over.
        """
        works = list((self.live if live is None else live).values())
        if at_rest is None:
            self._let_go += works  # first: whoever has waited goes on at once, and drains
        elif not (works and at_rest()):
            return 0
        return sum(work.give_up() for work in works)
