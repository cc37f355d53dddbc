"""Works whose waiters can be let go: in Python, behind a future, and in DDP's reducer, which waits in C++."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch.nn.parallel import DistributedDataParallel  # noqa: E402 - likewise

from resilient_train.frameworks.torch.communication import process_group as group_module  # noqa: E402 - likewise
from resilient_train.frameworks.torch.communication.guarded_works import (  # noqa: E402 - likewise
    GuardedMessage,
    GuardedWork,
    ScatteredWork,
    Works,
)
from resilient_train.frameworks.torch.communication.process_group import ResilientGroup  # noqa: E402 - likewise

GIVEN_UP = "the collective was given up"


class Inner:
    """A work of gloo's, as far as a guard knows it; ends when it is told to."""

    def __init__(self) -> None:
        self._gate: Any = torch.futures.Future()
        self._error: BaseException | None = None
        self.value = [torch.ones(2)]
        self._future = self._gate.then(self._open)

    def _open(self, _gate: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self.value

    def get_future(self) -> Any:
        return self._future

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._gate.set_result(None)


@pytest.fixture
def inner() -> Inner:
    return Inner()


@pytest.fixture
def works() -> Works:
    return Works()


@pytest.fixture
def work(inner: Inner, works: Works) -> GuardedWork:
    return GuardedWork(inner, works.live)


def test_a_work_that_ends(work: GuardedWork, inner: Inner, works: Works) -> None:
    assert not work.is_completed()
    inner.end()
    assert work.wait()
    assert work.succeeded
    assert work.get_future().value() is inner.value
    assert not works.live
    assert works.release() == 0


def test_a_work_that_fails(work: GuardedWork, inner: Inner, works: Works) -> None:
    inner.end(RuntimeError("Connection closed by peer"))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        work.wait()
    assert work.is_completed()
    assert not work.succeeded
    assert not works.live


def test_waiters_are_let_go(work: GuardedWork, works: Works) -> None:
    behind = work.get_future().then(lambda future: future.value()[0])
    assert works.release() == 1
    for wait in (work.wait, work.get_future().wait, work.get_future().value, behind.wait):
        with pytest.raises(RuntimeError, match=GIVEN_UP):
            wait()
    assert not work.succeeded


def test_a_work_that_ends_after_it_was_given_up(work: GuardedWork, inner: Inner, works: Works) -> None:
    """Completing a future of torch's a second time would end the process, on gloo's thread."""
    works.release()
    inner.end()
    with pytest.raises(RuntimeError, match=GIVEN_UP):
        work.wait()
    assert not work.succeeded


@pytest.mark.parametrize("failed", [False, True])
def test_a_recovery_waits_for_what_gloo_still_does_of_it(
    work: GuardedWork, inner: Inner, works: Works, failed: bool
) -> None:
    """It may write into a gradient, also when those who waited for it are gone."""
    works.release()
    asked = []

    def at_rest() -> bool:
        asked.append(work.ended)
        inner.end(RuntimeError("Connection closed by peer") if failed else None)
        return False

    assert works.drain(at_rest) == 0
    assert asked == [False]
    assert work.ended
    assert works.drain(at_rest) == 0
    assert asked == [False], "it is over"


@contextlib.contextmanager
def told_of_its_end(inner: Inner, work: GuardedWork, hears: Callable[[], None]) -> Iterator[None]:
    """gloo's thread ends it, and runs what was hung on it."""
    begun = threading.Event()
    work.get_future().add_done_callback(lambda _: (begun.set(), hears()))
    gloo = threading.Thread(target=inner.end)
    gloo.start()
    begun.wait()
    yield
    gloo.join()


def test_a_recovery_waits_for_what_scripts_hang_on_an_end(work: GuardedWork, inner: Inner, works: Works) -> None:
    """It may write into what the redone step reads, and communicate; gloo is at rest meanwhile."""
    goes_on, asked = threading.Event(), list[bool]()

    def at_rest() -> bool:
        asked.append(goes_on.is_set())
        if len(asked) == 3:
            goes_on.set()
        return True

    with told_of_its_end(inner, work, goes_on.wait):
        assert works.drain(at_rest) == 0
        assert asked[:3] == [False, False, False]
    assert works.drain(at_rest) == 0


def test_what_hears_of_an_end_and_waits_for_another_is_let_go(work: GuardedWork, inner: Inner, works: Works) -> None:
    said, other = list[str](), GuardedWork(Inner(), works.live)

    def waits() -> None:
        try:
            other.wait()
        except RuntimeError as error:
            said.append(str(error))

    with told_of_its_end(inner, work, waits):
        assert works.drain(lambda: True) == 1
    assert GIVEN_UP in said[0]


def test_what_hears_that_a_work_was_given_up_is_waited_for_as_well(work: GuardedWork, works: Works) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    work.get_future().add_done_callback(lambda _: (begun.set(), goes_on.wait()))
    rescue = threading.Thread(target=works.release)
    rescue.start()
    begun.wait()
    asked = 0

    def at_rest() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            goes_on.set()
        return True

    works.drain(at_rest)
    assert asked >= 3
    rescue.join()


def test_who_frees_a_group_for_ever_is_waited_for_once() -> None:
    ends = threading.Event()
    for _ in range(3):
        group_module.drop_by(lambda: bool(ends.wait()))  # type: ignore[arg-type, return-value]
    group_module.wait_for_droppers(0.2)
    group_module.wait_for_droppers(threading.TIMEOUT_MAX / 2)
    ends.set()


def test_whom_nobody_will_wake_is_let_go_at_once(inner: Inner, works: Works) -> None:
    def unasked() -> bool:
        raise AssertionError("nobody waits")

    assert works.release(unasked) == 0
    work = GuardedWork(inner, works.live)
    assert works.release(lambda: False) == 0
    assert not work.is_completed()
    assert works.release(lambda: GuardedWork(Inner(), works.live) is not None) == 1
    assert work.is_completed()
    assert len(works.live) == 1, "begun since"
    works.live.clear()
    assert works.drain(unasked) == 0, "gloo does nothing more for it"


def test_a_recovery_waits_for_no_work_that_nobody_goes_on_with(inner: Inner, works: Works) -> None:
    forgotten = weakref.ref(GuardedWork(inner, works.live))
    works.release()
    assert works.drain(lambda: True) == 0
    inner.end()
    gc.collect()
    assert forgotten() is None, "nobody keeps it, nor its tensors"


def test_a_wait_whose_time_runs_out(work: GuardedWork, inner: Inner, works: Works) -> None:
    """The work is still under way; but nobody has the result until it is asked for again."""
    works.since_update.append(work)
    for timeout in (timedelta(milliseconds=1), timedelta(seconds=-1), 0.001):
        with pytest.raises(RuntimeError, match="Operation timed out!"):
            work.wait(timeout)
        assert works.ran_out()
        assert not work.intact()
    inner.end()
    assert not work.intact()
    assert work.wait(timedelta(seconds=5))
    assert work.intact()
    assert not works.ran_out()


def test_who_asks_whether_a_work_is_over_has_seen_its_end(work: GuardedWork, inner: Inner) -> None:
    with pytest.raises(RuntimeError, match="Operation timed out!"):
        work.wait(timedelta(milliseconds=1))
    assert not work.is_completed()
    assert not work.intact()
    inner.end()
    assert work.is_completed()
    assert work.intact()


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(microseconds=999), timedelta.max, None, 0])
def test_times_that_are_no_limit(work: GuardedWork, inner: Inner, timeout: Any) -> None:
    """gloo counts whole milliseconds."""
    threading.Timer(0.02, inner.end).start()
    assert work.wait(timeout)


def test_a_time_that_is_none(work: GuardedWork) -> None:
    with pytest.raises(TypeError):
        work.wait("soon")  # type: ignore[arg-type] # that is what is tried


def test_a_wait_with_a_limit_is_let_go(work: GuardedWork, works: Works) -> None:
    threading.Timer(0.02, works.release).start()
    with pytest.raises(RuntimeError, match=GIVEN_UP):
        work.wait(timedelta(seconds=30))


class Posted:
    """A message of gloo's, which fails when its time is over."""

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        raise RuntimeError(f"Timed out waiting {timeout / timedelta(milliseconds=1):g}ms")


def test_a_message_that_failed_counts_at_the_next_update(works: Works) -> None:
    """Also where the script has swallowed its error."""
    message = GuardedMessage(Posted(), works, 0)
    assert message.intact()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Timed out waiting 7ms"):
            message.wait(timedelta(milliseconds=7))
    assert works.since_update == [message]
    assert not message.intact()


def test_one_that_was_cut_and_is_kept_keeps_nothing_of_gloos(works: Works) -> None:
    """torch's list of functional collectives has it to the end of the process, where nobody waits for it."""

    class Forgotten:
        def __init__(self) -> None:
            self.future: Any = torch.futures.Future()

        def get_future(self) -> Any:
            return self.future

    inner = Forgotten()
    gone, kept = weakref.ref(inner), GuardedWork(inner, works.live)
    del inner
    works.release()
    works.drain(lambda: True)
    gc.collect()
    assert gone() is None
    for ask in (kept.result, kept.source_rank, kept.wait):
        with pytest.raises(RuntimeError, match=GIVEN_UP):
            ask()


def test_a_recovery_waits_for_receives_that_nobody_waits_for(works: Works) -> None:
    """gloo may write into their tensors all the same."""
    rests = iter([False, False, True])
    GuardedMessage(Posted(), works, 0, receives=True)  # and nobody keeps it
    assert works.drain(lambda: next(rests)) == 0
    assert next(rests, None) is None
    GuardedMessage(Posted(), works, 0)
    waited_for = GuardedMessage(Posted(), works, 0, receives=True)
    with pytest.raises(RuntimeError, match="Timed out"):
        waited_for.wait(timedelta(milliseconds=7))
    assert not works.posted, "of a send, and of one whose end was seen"


def test_those_who_wait_in_later_groups_are_not_let_go(inner: Inner, works: Works) -> None:
    """By a thread that was to let others go, and comes to it when the recovery is over."""
    before = works.live
    assert works.drain(lambda: True) == 0
    work = GuardedWork(inner, works.live)
    assert works.release(live=before) == works.release(lambda: True, before) == 0
    assert not work.is_completed()


class Forgetful:
    """A Session's engine whose every collective is forgotten by gloo, and soon given up."""

    def __init__(self) -> None:
        self.forgets = False

    def issue(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
        work = group.run(verb, args)
        if self.forgets:
            work = GuardedWork(Inner(), group_module.works.live)
            group_module.works.release()
        return work

    def compare(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
        pass

    def take_back(self, group: ResilientGroup) -> None:
        pass


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forgetful]:
    watcher = Forgetful()
    dist.init_process_group("resilient", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(group_module, "_watcher", watcher)
    yield watcher
    dist.destroy_process_group()
    group_module.works.drain(lambda: True)  # what was let go is of this process's one and only list


def test_the_reducer_raises_too(session: Forgetful) -> None:
    """A gradient that was not reduced must not pass for one that was."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    session.forgets = True
    with pytest.raises(RuntimeError, match=GIVEN_UP):
        model(torch.ones(1, 4)).sum().backward()


def test_a_synchronous_collective_raises_too(session: Forgetful) -> None:
    session.forgets = True
    with pytest.raises(RuntimeError, match=GIVEN_UP):
        dist.all_reduce(torch.ones(1))


class WithoutFuture:
    """A reduce-scatter of gloo's, forgotten by it."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def get_future(self) -> Any:
        raise RuntimeError("ProcessGroup::Work::getFuture not implemented.")

    def wait(self) -> None:
        self.over.wait()


@pytest.mark.usefixtures("session")
def test_a_reduce_scatter_raises_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no future; a rank that waited on gloo itself was found hung, after a minute."""
    forgotten, works = WithoutFuture(), group_module.works
    group = dist.group.WORLD
    assert isinstance(group, ResilientGroup)

    def release() -> None:
        while not (works.live or forgotten.over.is_set()):
            time.sleep(0.001)
        works.release()

    releaser = threading.Thread(target=release)
    releaser.start()
    limit = threading.Timer(20, forgotten.over.set)  # or a failing test would never end
    limit.start()
    try:
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match=GIVEN_UP):
            patched.setattr(group, "inner", SimpleNamespace(reduce_scatter=lambda *_: forgotten))
            group.run_inner("reduce_scatter", ([torch.zeros(1)], [[torch.zeros(1)]])).wait()
    finally:
        limit.cancel()
        forgotten.over.set()
        releaser.join()


def test_a_reduce_scatter_is_a_work_like_others(works: Works) -> None:
    """gloo takes no notice of the limit of such a wait, and who has not waited for it has no result."""
    inner = WithoutFuture()
    work = ScatteredWork(inner, works.live)
    assert not work.is_completed()
    threading.Timer(0.02, inner.over.set).start()
    assert work.wait(timedelta(milliseconds=1))
    assert work.intact()
