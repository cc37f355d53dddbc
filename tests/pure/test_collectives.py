"""What becomes of a collective, and of what is known of it, by the mode that it is called in."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is

from resilient_train.errors import UsageError  # noqa: E402
from resilient_train.frameworks.accelerator import Host  # noqa: E402
from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch import groups as groups_module  # noqa: E402
from resilient_train.frameworks.torch.checks.unregistered import Unregistered  # noqa: E402
from resilient_train.frameworks.torch.collectives import TorchCollectives  # noqa: E402
from resilient_train.frameworks.torch.communication.guarded_works import GuardedWork  # noqa: E402
from resilient_train.frameworks.torch.communication.process_group import works  # noqa: E402
from resilient_train.frameworks.torch.groups import TorchGroups  # noqa: E402
from resilient_train.frameworks.torch.rank_state import TorchRankState  # noqa: E402
from resilient_train.protocol.rank_effects import Mode  # noqa: E402

pytestmark = pytest.mark.torch


class Work(GuardedWork):
    """Has ended, well or not."""

    def __init__(self, error: str) -> None:
        dist.Work.__init__(self)
        self.succeeded, self.ran_out = not error, False
        self.error = error

    def wait(self, timeout: Any = None) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return True


class Group:
    """Notes how a collective is run. ``error``: what those that are run fail with, or the call where it ``refuses``."""

    spans_job = True
    solo = False
    global_ranks = (0, 1)
    group_name = "0"

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.error = ""
        self.refuses = False
        self.broken = False
        self.forgotten = 0

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return 0

    def run(self, verb: str, _args: Any) -> Work:
        if self.refuses:
            raise RuntimeError(self.error)
        self.ran.append(verb)
        return Work(self.error)

    def cut(self, _error: RuntimeError) -> bool:
        return self.broken

    def run_alone(self, verb: str, _args: Any) -> Work:
        self.ran.append(f"{verb} alone")
        return Work("")

    def shut(self) -> None:
        pass

    def suspend(self, why: str) -> None:
        pass

    def adopt(self, built: Any) -> None:
        assert built == "new"

    def forget_messages(self) -> None:
        self.forgotten += 1


class Rank:
    """The collectives of one rank, with one group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.entered = 0
        self.checked: list[str] = []
        self.groups = TorchGroups(Host())
        self.collectives = TorchCollectives(
            Objects((), ()), self.groups, self.checked.append, Unregistered(), TorchRankState((), {})
        )
        self.in_front = False
        conductor = SimpleNamespace(in_front=lambda: self.in_front)
        self.collectives.attach(conductor, SimpleNamespace(enter_collective=self._enter))  # type: ignore[arg-type]

    def _enter(self) -> None:
        self.entered += 1

    def call(self, error: str = "", verb: str = "allreduce") -> None:
        self.group.error = error
        args = ([], 1, 0) if verb in ("send", "recv") else ()
        self.collectives.issue(self.group, verb, args)  # type: ignore[arg-type]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    group = Group()
    monkeypatch.setattr(groups_module, "groups", {"world": group})
    made = Rank(group)
    yield made
    made.collectives.detach()
    works.since_update.clear()


def test_an_update_needs_all_collectives_since_the_one_before(rank: Rank) -> None:
    """Nobody else may have waited for one that failed; and the mode may change in between."""
    rank.call()
    rank.call("a peer is gone")
    for mode in (Mode.UPDATE, Mode.LOG, Mode.DIRECT):
        rank.collectives.set_mode(mode)
    rank.call()
    assert not rank.collectives.intact()
    rank.call()
    assert rank.collectives.intact(), "each counts once"
    assert rank.entered == 4
    assert rank.checked == ["allreduce"] * 4


@pytest.mark.parametrize("verb", ["_reduce_scatter_base", "send", "recv"])
def test_a_call_that_a_fault_refuses_counts_as_well(rank: Rank, verb: str) -> None:
    """There is no work that could, and the script may have caught the error. What it was told off for is its own."""
    rank.group.refuses = True
    for rank.group.broken in (False, True):
        with pytest.raises(RuntimeError, match="no such shape"):
            rank.call("no such shape", verb)
        assert rank.collectives.intact() is not rank.group.broken
    assert rank.collectives.intact(), "each counts once"


def test_what_a_cut_body_had_begun_does_not_count_any_more(rank: Rank) -> None:
    rank.call("cut")
    rank.groups.close()
    rank.call("begun by a thread that had not heard of it")
    rank.groups.adopt(["new"], replaced=True)
    rank.collectives.set_mode(Mode.LOOPBACK)
    assert rank.group.forgotten == 0, "the tail before may have messages under way"
    rank.collectives.set_mode(Mode.DIRECT)
    assert rank.group.forgotten == 1
    assert rank.collectives.intact()
    rank.collectives.set_mode(Mode.DIRECT)
    assert rank.group.forgotten == 1


def test_behind_a_cut_body_each_rank_is_alone(rank: Rank) -> None:
    rank.collectives.set_mode(Mode.LOOPBACK)
    rank.call()
    assert rank.group.ran == ["allreduce alone"]
    assert rank.entered == 0, "the others do not wait for it"
    assert rank.collectives.intact()


def test_a_collective_in_a_half_done_update_is_refused(rank: Rank) -> None:
    rank.collectives.set_mode(Mode.UPDATE)
    with pytest.raises(UsageError, match="half done"):
        rank.call()
    rank.call(verb="send")
    assert rank.group.ran == ["send"]


@pytest.mark.parametrize("verb", ["allreduce", "send"])
def test_in_front_of_a_body_it_is_refused(rank: Rank, verb: str) -> None:
    rank.in_front = True
    with pytest.raises(UsageError, match=r"test_collectives.py:\d+: .* in front of `with step:`"):
        rank.call(verb=verb)
    assert rank.group.ran == []


def test_of_a_loader_it_is_refused(rank: Rank) -> None:
    with rank.collectives.loading(), pytest.raises(UsageError, match=r"test_collectives.py:\d+: the loader called"):
        rank.call()
    rank.call()
    assert rank.group.ran == ["allreduce"]


def test_on_a_thread_of_the_users_it_is_refused_and_on_one_of_gloos_it_is_not(rank: Rank) -> None:
    raised: list[str] = []

    def call(*_: Any) -> None:
        try:
            rank.call()
        except UsageError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call, name="logs")
    thread.start()
    thread.join()
    assert len(raised) == 1
    assert "allreduce was called on thread 'logs'" in raised[0]
    assert rank.checked == [], "no optimizer is to blame"
    libc, ident = ctypes.CDLL(None), ctypes.c_ulong()
    routine = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(call)
    assert libc.pthread_create(ctypes.byref(ident), None, routine, None) == 0
    assert libc.pthread_join(ident, None) == 0
    assert len(raised) == 1
    assert rank.group.ran == ["allreduce"]
