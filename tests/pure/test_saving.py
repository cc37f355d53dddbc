"""A rank's snapshots between fence and record: what the agent is told, and what is left when one fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pure.fake_accelerator import Machine  # noqa: E402
from pure.silent_holder import silent_holder  # noqa: E402
from pure.staging_rig import TIMEOUT_S, LateCopier, Trained, trained_pair  # noqa: E402
from resilient_train._native import DIGEST_CHUNK_BYTES, Board, Copier  # noqa: E402
from resilient_train.errors import MemoryLimitError  # noqa: E402
from resilient_train.frameworks.torch.tensors import staging  # noqa: E402
from resilient_train.protocol.messages import Captured, OpenVault, Skipped, Unsaved, VaultOpened  # noqa: E402
from resilient_train.session.comparisons.replica_comparison import Comparison, fingerprint  # noqa: E402
from resilient_train.session.peers import Peers  # noqa: E402
from resilient_train.session.saves import saving as saving_module  # noqa: E402
from resilient_train.session.saves.cadence import Due, Wish  # noqa: E402
from resilient_train.session.saves.saving import Saving  # noqa: E402
from resilient_train.session.saves.snapshot_names import OFF  # noqa: E402
from resilient_train.state.arena import Arena  # noqa: E402
from resilient_train.state.vault.slots import SlotPair, create  # noqa: E402

pytestmark = pytest.mark.torch
DIGEST = "5" * 32
RANK = 1
"""Not 0: that one decides when, with what it measures."""


def nobody(_: int) -> int:
    raise AssertionError("no other rank's arena is asked for")


class Rank:
    """A Saving, with everything around it in this process: the agent's ear, the holder's slots, a board."""

    def __init__(self, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copier = LateCopier()
        self.heard: list[Any] = []
        self.board = Board.create(2)
        self.arena = Arena.create(64, 0)
        self.arena.publish(1, b"published")
        self.pair: SlotPair | None = None
        self.lacking = ""
        self.opened = VaultOpened()
        vault = SimpleNamespace(reserve=self._reserve, open=lambda _: [], hear=lambda: None, close=lambda: None)
        monkeypatch.setattr(saving_module, "Copier", lambda: self.copier)
        monkeypatch.setattr(saving_module.Vault, "connect", lambda *_, **__: vault)
        link: Any = SimpleNamespace(
            rank=RANK,
            world_size=2,
            generation=4,
            peers=Peers(self.board, RANK, self.arena, nobody, nobody),
            channel=SimpleNamespace(send=self.heard.append),
            expect=lambda _: self.opened,
        )
        made = SimpleNamespace(digest=lambda: DIGEST)
        state: Any = SimpleNamespace(image=trained.state.image, fingerprint=lambda after: made, on_host=lambda: True)
        step: Any = SimpleNamespace(layout=lambda: b"", changed_beside=lambda *, sometimes: ())
        publication: Any = SimpleNamespace(latest=b"published")
        self.events: list[tuple[str, dict[str, Any]]] = []
        groups = ((0, 1),)
        comparison = Comparison(link, state, SimpleNamespace(averages=lambda: True), groups, 0, lambda: ("", ""))
        self.saving = Saving(
            link, state, step, publication, "run", groups, lambda *event: self.events.append(event), comparison
        )
        self.saving.every(Wish(steps=1))

    def _reserve(self, rank: int, size: int) -> SlotPair:
        if self.lacking:
            raise MemoryLimitError(self.lacking)
        self.pair = SlotPair(create(rank, size), writes=True)
        return self.pair

    def head(self, commits: int, due: Due = Due.STORAGE) -> None:
        self.board.announce(commits, due)
        self.board.set_kept(1 - RANK, *self.board.kept(RANK))  # the other rank has what this one has
        self.saving.head(commits, commits)
        self.saving.body_begins(commits)

    def told(self) -> list[Any]:
        """What the agent has heard of snapshots since the last call."""
        heard = [each for each in self.heard if not isinstance(each, OpenVault)]
        self.heard.clear()
        return heard

    def snapshots(self) -> list[int]:
        """The updates of the snapshots that are complete, and have their digest; newest first."""
        assert self.pair is not None
        found = self.pair.complete()
        assert all(self.pair.verified(Copier(1), each, 10_000) for each in found)
        return [each.commits for each in found]


@pytest.fixture
def machine() -> Machine:
    return Machine(training_is_eager=True, side_is_eager=False)


@pytest.fixture
def trained(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.setattr(staging, "BUFFER_BYTES", DIGEST_CHUNK_BYTES)
    return trained_pair(machine)[0]


@pytest.fixture
def rank(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(trained, monkeypatch)
    yield rank
    rank.copier.go.set()
    rank.saving.close()


def captured(commits: int, sequence: int, last: int = -1) -> Captured:
    return Captured(commits, commits, sequence, store=True, last=last, fingerprint=fingerprint(DIGEST))


def test_a_snapshot_counts_when_it_is_in_its_slot(rank: Rank, trained: Trained) -> None:
    rank.head(1)
    rank.saving.fence()
    trained.update(0.125)
    assert (rank.told(), rank.snapshots()) == ([], []), "it is on the host, and not yet in the slot"
    rank.head(2, Due.NOTHING)
    assert (rank.told(), rank.snapshots()) == ([], []), "nor is it waited for"
    rank.copier.go.set()
    rank.saving.wait()
    assert (rank.told(), rank.snapshots()) == ([captured(1, 1)], [1])


def in_its_slot(rank: Rank) -> None:
    assert rank.saving._in_flight is not None
    rank.saving._in_flight.capture._thread.join(TIMEOUT_S)
    assert rank.saving._in_flight.capture.done


def test_the_next_fence_tells_of_it(rank: Rank) -> None:
    """Before a barrier, that is: what a head tells, the ranks would hear at different times, and keep other ones."""
    rank.head(1)
    rank.saving.fence()
    rank.copier.go.set()
    in_its_slot(rank)
    rank.head(2, Due.NOTHING)
    assert (rank.told(), rank.snapshots()) == ([], [])
    rank.saving.fence()
    assert (rank.told(), rank.snapshots()) == ([captured(1, 1)], [1])


def test_the_next_snapshot_is_left_out_until_then(rank: Rank, trained: Trained) -> None:
    rank.copier.go.set()
    for commits in (1, 2, 3):
        rank.head(commits)
        in_its_slot(rank)
        rank.saving.fence()
        trained.update(0.125)
    assert rank.told() == [captured(1, 1), captured(2, 2), captured(3, 3)]
    assert rank.snapshots() == [3, 2]
    rank.copier.go.clear()
    rank.head(4)
    rank.saving.fence()
    rank.copier.go.set()
    in_its_slot(rank)
    rank.head(5)
    (skipped,) = rank.told()
    assert isinstance(skipped, Skipped)
    assert skipped.commits == 5
    rank.saving.fence()
    assert (rank.told(), rank.snapshots()) == ([captured(4, 4)], [4, 3])


def test_a_device_that_fails_leaves_the_snapshot_before(rank: Rank, machine: Machine) -> None:
    rank.copier.go.set()
    rank.head(1)
    rank.saving.wait()
    rank.told()
    machine.broken = True
    rank.head(2)
    rank.saving.fence()
    rank.saving.fence()  # there is nothing under way any more
    (skipped,) = rank.told()
    assert isinstance(skipped, Skipped)
    assert skipped.commits == 2
    assert skipped.reason.startswith("rank 1: the state could not be copied off the device (DeviceError: ")
    assert rank.snapshots() == [1]
    machine.broken = False
    rank.head(3)
    rank.saving.wait()
    assert (rank.told(), rank.snapshots()) == ([captured(3, 3)], [3, 1])


def test_a_recovery_goes_on_without_the_snapshot_that_fails(rank: Rank, machine: Machine) -> None:
    machine.broken = True
    rank.head(1)
    rank.saving.wait()
    (skipped,) = rank.told()
    assert isinstance(skipped, Skipped)
    assert rank.snapshots() == []


@pytest.fixture
def host_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """Of a state that lies on the host, so that it is copied where it lies, behind the training's back."""
    trained = Trained()
    trained.update(0.5)
    rank = Rank(trained, monkeypatch)
    rank.copier.go.set()
    yield rank
    rank.copier.broken = ""
    rank.saving.close()


def test_what_lies_behind_an_image_may_not_fit(host_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for smaller than it is: no snapshot, and no error in the loop."""
    with monkeypatch.context() as short:
        short.setattr(saving_module.trailer, "size_bytes", lambda *_: -2000)
        host_rank.head(1)
        host_rank.saving.wait()
    (skipped,) = host_rank.told()
    assert isinstance(skipped, Skipped)
    assert "no room for a trailer" in skipped.reason
    host_rank.head(2)
    host_rank.saving.wait()
    assert host_rank.told() == [captured(2, 1)]
    assert host_rank.snapshots() == [2]


@pytest.mark.parametrize("at", ["wait", "late"])
@pytest.mark.parametrize("how", ["fence", "wait"])
def test_a_host_copy_that_fails_leaves_the_snapshot_before(host_rank: Rank, at: str, how: str) -> None:
    """``optimizer.step()`` knows nothing of it, and no recovery: the agent is told."""
    host_rank.head(1)
    host_rank.saving.wait()
    assert host_rank.told() == [captured(1, 1)]
    host_rank.copier.broken = at
    host_rank.head(2)
    getattr(host_rank.saving, how)()
    host_rank.saving.fence()  # there is nothing under way any more
    (skipped,) = host_rank.told()
    assert isinstance(skipped, Skipped)
    assert (skipped.commits, skipped.reason.startswith("rank 1: copying ")) == (2, True), skipped
    assert host_rank.snapshots() == [1]
    host_rank.copier.broken = ""
    host_rank.head(3)
    host_rank.saving.fence()
    host_rank.saving.wait()
    assert (host_rank.told(), host_rank.snapshots()) == ([captured(3, 3)], [3, 1])


@pytest.mark.parametrize("which", ["copy", "fingerprint"])
def test_a_host_copy_that_can_not_begin_ends_the_saving_and_no_step(
    host_rank: Rank, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_thread(**_: Any) -> None:
        raise OSError("no thread")

    host_rank.head(1)
    host_rank.saving.wait()
    host_rank.told()
    if which == "copy":
        host_rank.copier.broken = "gather"
    else:
        host_rank.saving._state.fingerprint = no_thread  # type: ignore[method-assign]
    host_rank.head(2)
    assert host_rank.told() == [Skipped(2, 2, "rank 1: no thread")]
    assert "rank 1 saves nothing any more: no thread" in capsys.readouterr().err
    assert host_rank.board.kept(RANK) == (1, OFF), "what all ranks hold stays"
    host_rank.saving.fence()
    host_rank.head(3)
    assert host_rank.told() == []


def test_what_is_short_for_a_moment_ends_no_saving(host_rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    def no_descriptor(**_: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    host_rank.head(1)
    host_rank.saving.wait()
    made = host_rank.saving._state.fingerprint
    host_rank.saving._state.fingerprint = no_descriptor  # type: ignore[method-assign]
    host_rank.head(2)
    assert host_rank.told() == [captured(1, 1), Skipped(2, 2, "rank 1: [Errno 24] too many open files")]
    host_rank.saving._state.fingerprint = made  # type: ignore[method-assign]
    host_rank.head(3)
    host_rank.saving.wait()
    assert (host_rank.told(), host_rank.snapshots()) == ([captured(3, 3)], [3, 1])
    assert not capsys.readouterr().err


@pytest.mark.parametrize("at", ["gather", "wait", "late"])
def test_a_last_host_copy_that_fails_is_told(host_rank: Rank, at: str) -> None:
    host_rank.copier.broken = at
    host_rank.saving.last(4, 1, 1, None)
    (unsaved,) = host_rank.told()
    assert isinstance(unsaved, Unsaved)
    assert unsaved.reason.startswith("rank 1: "), unsaved


def test_the_last_one_is_waited_for(rank: Rank, machine: Machine) -> None:
    rank.copier.go.set()
    rank.head(1)
    rank.saving.last(4, 1, 1, None)
    assert rank.told() == [captured(1, 1), captured(1, 2, last=4)]
    assert rank.snapshots() == [1], "in the place of the first, of which the other rank knew nothing"
    machine.broken = True
    rank.saving.last(5, 1, 1, None)
    (unsaved,) = rank.told()
    assert isinstance(unsaved, Unsaved)
    assert "the device has failed" in unsaved.reason
    rank.saving.close()


def test_without_pinned_memory_the_training_goes_on(
    rank: Rank, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.pinned_limit = 0
    rank.head(1)
    assert "rank 1 saves nothing any more: 4194304 bytes of host memory could not be pinned" in capsys.readouterr().err
    rank.saving.fence()


def test_a_job_that_ends_early_leaves_no_half_of_it(rank: Rank) -> None:
    rank.head(1)
    rank.saving.fence()
    assert rank.pair is not None
    left = SlotPair(os.dup(rank.pair.fd), writes=False)
    rank.copier.go.set()
    rank.saving.close()
    assert rank.told() == []
    assert left.complete() == []
    left.close()


def take_the_first(rank: Rank) -> None:
    rank.copier.go.set()
    rank.head(1)
    in_its_slot(rank)
    rank.saving.fence()
    assert rank.told() == [captured(1, 1)]


def test_a_rank_without_memory_leaves_off(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    take_the_first(rank)
    assert rank.pair is not None
    rank.pair.capacity_bytes = 0  # the state has grown
    rank.lacking = "900 MB are missing"
    rank.head(2)
    assert rank.told() == [Skipped(2, 2, "rank 1: 900 MB are missing")], "nobody is to wait for it"
    assert rank.events == [("save_off", {"reason": "900 MB are missing"})]
    assert "rank 1 saves nothing any more: 900 MB are missing" in capsys.readouterr().err
    assert rank.board.kept(RANK) == (1, OFF), "what all ranks hold stays"
    rank.head(3)
    assert rank.told() == []


def test_without_a_holder_at_the_moment_a_rank_asks_again(rank: Rank) -> None:
    rank.copier.go.set()
    rank.opened = VaultOpened("it takes its time", later=True)
    rank.head(1)
    assert rank.told() == [Skipped(1, 1, "rank 1: it takes its time")]
    assert rank.events == []
    rank.opened = VaultOpened()
    rank.head(2)
    assert rank.pair is not None


def test_a_holder_that_does_not_answer_costs_one_snapshot(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.copier.go.set()
    with silent_holder() as silent, monkeypatch.context() as stopped:
        stopped.setattr(saving_module.Vault, "connect", lambda *_, **__: silent)
        rank.head(1)
        (skipped,) = rank.told()
        assert isinstance(skipped, Skipped)
        assert "did not answer" in skipped.reason
    rank.head(2)
    in_its_slot(rank)
    rank.saving.fence()
    assert rank.told() == [captured(2, 1)], "of the holder that answers now"
    assert rank.events == []


def test_the_others_leave_off_when_the_next_snapshot_is_due(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    take_the_first(rank)
    rank.board.set_kept(1 - RANK, 1, OFF)
    rank.saving.head(2, 2)
    assert rank.events == [], "none was due"
    rank.board.announce(3, Due.STORAGE)
    rank.saving.head(3, 3)
    (kind, detail), *more = rank.events
    assert (kind, detail["follows"], more) == ("save_off", 1 - RANK, [])
    assert "rank 0 takes no snapshots any more" in detail["reason"]
    assert capsys.readouterr().err == "", "once for a job is enough"
    assert rank.board.kept(RANK) == (1, OFF)
    assert rank.told() == []
