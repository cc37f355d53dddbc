"""How long a body computes: without what it waits for, and in DDP's reducer too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resilient_train.session import compute_clock
from resilient_train.session.compute_clock import ComputeClock

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch.nn.parallel import DistributedDataParallel  # noqa: E402 - likewise

from resilient_train.frameworks.torch.communication import process_group as group_module  # noqa: E402 - likewise
from resilient_train.frameworks.torch.communication.guarded_works import GuardedWork  # noqa: E402 - likewise
from resilient_train.frameworks.torch.communication.process_group import ResilientGroup  # noqa: E402 - likewise
from resilient_train.frameworks.torch.communication.waits import CollectiveWaits, waits  # noqa: E402 - likewise

MS = 1_000_000
LATE_S = 0.05


class Rig:
    """A clock of bodies, and what it was told: time passes, and the rank has waited, for as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**15
        self.waited_ns = 0
        self.told: list[int] = []
        self.clock = ComputeClock(lambda: self.waited_ns, self.told.append)
        monkeypatch.setattr(compute_clock, "time", self)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def test_what_was_waited_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.waited_ns = 10**12
    rig.clock.start()
    rig.sleep(0.05)
    rig.waited_ns += 30 * MS
    rig.clock.stop()
    rig.clock.stop()
    assert rig.told == [20 * MS], "and once only"
    rig.clock.start()
    rig.waited_ns += 1000 * MS
    rig.clock.stop()
    assert rig.told[1] < 0, "such a window does not count"


def test_a_body_is_made_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for times in (1, 3):
        if times > 1:
            rig.clock.slow_down(times)
        for _ in range(3):
            rig.clock.start()
            rig.sleep(0.01)
            rig.clock.stop()
    assert rig.told == [10 * MS] * 3 + [30 * MS] * 3, "what it sleeps does not add up"


class Late:
    """A work that ends a while after its timer was started."""

    def __init__(self, inner: dist.Work) -> None:
        self._future: Any = torch.futures.Future()
        inner.wait()
        value = inner.get_future().value()
        self.timer = threading.Timer(LATE_S, self._future.set_result, (value,))

    def get_future(self) -> Any:
        return self._future


class LateCollectives:
    """A Session's engine in which each collective ends late: the other ranks compute for longer."""

    starts = True
    """The timer, when the collective has begun. However busy the machine is, the wait is no shorter then."""
    newest: Late

    def issue(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
        self.newest = Late(getattr(group.inner, verb)(*args))
        work = GuardedWork(self.newest, group_module.works.live)  # type: ignore[arg-type]
        waits.begun()
        if self.starts:
            self.newest.timer.start()
        return work

    def compare(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
        pass

    def take_back(self, group: ResilientGroup) -> None:
        pass


@pytest.fixture
def late() -> Iterator[Any]:
    dist.init_process_group("resilient", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(4, 4)
    wrapped = DistributedDataParallel(model)
    yield wrapped
    dist.destroy_process_group()


@pytest.fixture
def collectives(late: Any, monkeypatch: pytest.MonkeyPatch) -> LateCollectives:
    """Of a model that was made without it."""
    made = LateCollectives()
    monkeypatch.setattr(group_module, "_watcher", made)
    return made


def waited_s(what: Any) -> tuple[float, float]:
    """How long it took, and how much of it was waited."""
    begun_ns, before_ns = time.monotonic_ns(), waits.total_ns()
    what()
    after_ns = waits.total_ns()
    return (time.monotonic_ns() - begun_ns) / 1e9, (after_ns - before_ns) / 1e9


def test_a_wait_in_python(collectives: LateCollectives, monkeypatch: pytest.MonkeyPatch) -> None:
    collectives.starts, until = False, waits.until

    def begins(wait: Callable[[], Any]) -> None:
        until(lambda: (collectives.newest.timer.start(), wait()))

    monkeypatch.setattr(waits, "until", begins)
    took_s, waited = waited_s(lambda: dist.all_reduce(torch.ones(1)))
    assert LATE_S <= waited <= took_s


@pytest.mark.usefixtures("collectives")
def test_a_wait_of_the_reducer(late: Any) -> None:
    """It waits in C++; two passes in one window."""

    def passes() -> None:
        for _ in range(2):
            late(torch.ones(1, 4)).sum().backward()
            time.sleep(LATE_S)

    passes()  # DDP lays its buckets out anew
    took_s, waited = waited_s(passes)
    assert waited >= 2 * LATE_S
    assert waited <= took_s - 2 * LATE_S, "what was slept behind the passes was no wait"


@pytest.mark.usefixtures("collectives")
def test_what_overlaps_is_no_wait() -> None:
    in_wait: list[float] = []

    def overlapped() -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(2 * LATE_S)
        in_wait.append(waited_s(work.wait)[0])

    _, waited = waited_s(overlapped)
    assert waited <= in_wait[0]


def test_a_wait_in_a_thread_of_the_user_is_nobodys() -> None:
    own = CollectiveWaits()
    thread = threading.Thread(target=own.until, args=(lambda: time.sleep(0.02),))
    thread.start()
    thread.join()
    assert own.total_ns() == 0
