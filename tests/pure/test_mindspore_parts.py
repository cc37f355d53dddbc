"""Parts of the MindSpore callbacks that need no MindSpore; whole stories are in tests/on_mindspore."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from resilient_train.errors import UsageError
from resilient_train.integrations import mindspore
from resilient_train.integrations.mindspore import ttp_directory
from resilient_train.integrations.mindspore.agreed_step import STOP, AgreedStep, Asked, pause
from resilient_train.integrations.mindspore.preemption import SIGNALS, Preemption
from resilient_train.integrations.mindspore.rank_folder import NOBODY, AgentFolder, RankFolder, RankStands


def test_what_needs_mindspore_is_imported_when_it_is_asked_for() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Fault'"):
        mindspore.Fault  # noqa: B018 - the access is what is tested
    assert set(mindspore.__all__) == set(mindspore._WHERE)


def test_all_ranks_need_one_folder(tmp_path: Path) -> None:
    """Who has finished a step sees the signs of all."""
    one, other = AgreedStep(tmp_path / "a", 0, 2), AgreedStep(tmp_path / "b", 1, 2)
    with pytest.raises(UsageError, match="rank 0 has finished step 1, and rank 1 has left no sign"):
        one.look(1)
    with pytest.raises(UsageError, match="rank 1 has finished step 1, and rank 0 has left no sign"):
        other.look(1)
    AgreedStep(tmp_path / "a", 1, 2)
    assert one.look(1) is None
    one.ask(Asked(3, STOP))
    assert one.look(2) == Asked(3, STOP)


@pytest.mark.parametrize(
    ("asked", "done"),
    [
        ([pause(0)], pause(0)),
        ([pause(1), pause(0)], pause(0)),
        ([pause(0), STOP], STOP),
        ([pause(0), 4, 3], 3),
        ([STOP, 4], 4),
    ],
)
def test_what_is_done_if_ranks_want_several_things(tmp_path: Path, asked: list[int], done: int) -> None:
    ranks = [AgreedStep(tmp_path, rank, len(asked)) for rank in range(len(asked))]
    for rank, back_to in zip(ranks, asked, strict=True):
        rank.ask(Asked(6, back_to))
    found = [rank.look(5) for rank in ranks]
    assert found == [Asked(6, done)] * len(asked)
    assert all(each is not None and each.is_pause == (done not in (STOP, 3, 4)) for each in found)
    assert pause(pause(7)) == 7


def test_a_pause_by_files(tmp_path: Path) -> None:
    """One that is over is not the next one, also for a rank that looks late."""
    agent = AgentFolder(tmp_path / "ranks", 2)
    ranks = [RankFolder(tmp_path / "ranks", rank) for rank in range(2)]
    ranks[0].tell(0)
    assert agent.ranks() == []
    ranks[1].tell(3)
    ranks[0].tell(12, left=True)
    assert agent.ranks() == [RankStands(12, left=True), RankStands(3)]
    assert ranks[0].wanted() == NOBODY
    agent.pause()
    first = ranks[0].wanted()
    ranks[0].stand(first, 12)
    assert agent.stand_behind() == NOBODY
    ranks[1].stand(first, 12)
    assert agent.stand_behind() == 12
    agent.unpause()
    assert ranks[1].goes_on(first)
    agent.pause()
    assert ranks[1].goes_on(first)
    assert not ranks[1].goes_on(ranks[1].wanted())
    assert agent.stand_behind() == NOBODY
    agent.begin_life()
    assert agent.asked
    assert agent.ranks() == []
    assert not AgentFolder(tmp_path / "ranks", 2).asked, "what another job has left"


def test_which_signals_are_taken() -> None:
    """A second one changes nothing; behind it they do what they did before."""
    before = {each: signal.getsignal(each) for each in (*SIGNALS, signal.SIGINT)}
    late: list[int | None] = []
    preemption = Preemption(lambda: late.append(preemption.got), 0.0, lambda: None, 60.0, before)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 20
        while not late:
            assert time.monotonic() < deadline, "its thread has not seen the signal"
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        preemption.close()
    assert preemption.got == signal.SIGINT
    assert {each: signal.getsignal(each) for each in before} == before


def test_a_signal_that_is_not_taken_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    preemption = Preemption(lambda: None, 1.0, lambda: None, 2.0)
    assert signal.getsignal(signal.SIGINT) == before
    preemption.close()


@pytest.mark.parametrize("name", ["ttp_rank_1-2_3.ckpt", "Exception-2_3_breakpoint.ckpt"])
def test_a_part_is_found_whatever_its_file_is_called(tmp_path: Path, name: str) -> None:
    groups = [[0], [1]]
    for rank in range(2):
        (ttp_directory.make_stage(tmp_path, rank) / name).write_text("state")
        assert ttp_directory.deliver(tmp_path, 9, rank, groups) == (rank == 1)
    ((step, path),) = ttp_directory.complete(tmp_path)
    assert step == 9
    assert ttp_directory.parts(path) == {rank: path / f"rank_{rank}" / name for rank in range(2)}
