"""The end of a job of ``mindio_ttp``: who names the end-of-life checkpoint, and what is said of it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient_train.integrations.mindio.controller import (
    Effect,
    MindioController,
    MindioStage,
    To,
    TrainingEnded,
    outcome,
)
from resilient_train.integrations.mindio.frames import (
    NAMED,
    WORDS,
    Did,
    RenameOrder,
    ReplicaGroup,
    ReportState,
    StopOrder,
)
from resilient_train.integrations.mindio.mindx_controller import FAILED, MindXController
from resilient_train.integrations.mindio.processor import Processor


def naming(world_size: int = 4, made: type[MindioController] = MindioController) -> MindioController:
    """All hold the same behind update 3. Rank 0 has saved it, and is asked to name it."""
    job = made(world_size)
    for rank in range(world_size):
        job.hello(rank)
    for rank in range(world_size):
        job.replicas(rank, (ReplicaGroup(tuple(range(world_size)), world_size),))
        job.status(rank, 3, updating=False)
    job.leave("somebody wants it to end")
    for rank in range(world_size):
        job.did(rank, Did(job.round, "halt", 0, 3))
    assert asked(job.did(0, Did(job.round, "save", 0, 3))) == [0]
    assert job.stage is MindioStage.RENAMING
    return job


def asked(effects: list[Effect]) -> list[int]:
    return [each.rank for each in effects if isinstance(each, To) and isinstance(each.frame, RenameOrder)]


def ended(effects: list[Effect]) -> TrainingEnded:
    (end,) = [each for each in effects if isinstance(each, TrainingEnded)]
    return end


def answer(job: MindioController, rank: int, code: int = 0) -> list[Effect]:
    return job.did(rank, Did(job.round, "rename", code, 3))


@pytest.mark.parametrize(
    "befalls",
    [
        lambda job: job.reported(0, ReportState.RS_UCE),
        lambda job: job.reported(0, ReportState.RS_UNKNOWN),
        lambda job: job.status(0, 3, updating=True),
        lambda job: job.gone(1),
        lambda job: job.bye(1),
    ],
    ids=["memory lost", "script failed", "it moves", "another is gone", "another is at its end"],
)
def test_what_befalls_ranks_takes_nothing_from_what_is_written(
    befalls: Callable[[MindioController], list[Effect]],
) -> None:
    job = naming()
    number = job.round
    told = befalls(job)
    assert not [each for each in told if isinstance(each, To)], "nobody is asked for anything more"
    assert job.round == number
    assert ended(answer(job, 0))[:2] == (3, "somebody wants it to end")


@pytest.mark.parametrize(
    "befalls",
    [
        lambda job: job.gone(0),
        lambda job: job.bye(0),
        lambda job: job.expired(job.round, MindioStage.RENAMING),
        lambda job: answer(job, 0, 1),
    ],
    ids=["gone", "at its end", "late", "failed"],
)
def test_another_rank_names_it(befalls: Callable[[MindioController], list[Effect]]) -> None:
    job = naming()
    before = job.round
    assert asked(befalls(job)) == [1]
    assert job.did(0, Did(before, "rename", 0, 3)) == [], "what comes too late counts for nothing"
    assert job.expired(before, MindioStage.RENAMING) == [], "rank 1 has its own time"
    assert ended(answer(job, 1))[:2] == (3, "somebody wants it to end")


def test_another_rank_finds_it_named() -> None:
    job = naming()
    job.gone(0)
    end = ended(answer(job, 1, NAMED))
    assert (end.saved, end.unnamed) == (3, -1)
    assert "rank 0 was lost before it answered, and rank 1 finds the checkpoint under its name" in end.reason


def test_who_is_asked_first_can_not_find_it_named() -> None:
    """What stands there is another job's."""
    assert asked(answer(naming(), 0, NAMED)) == [1]


def test_who_has_written_is_asked_before_who_has_not() -> None:
    job = MindioController(4)
    for rank in range(4):
        job.hello(rank)
    for rank in range(4):
        job.replicas(rank, (ReplicaGroup((0, 3), 1) if rank in (0, 3) else ReplicaGroup((1, 2), 2),))
        job.status(rank, 3, updating=False)
    job.leave("somebody wants it to end")
    for rank in range(4):
        job.did(rank, Did(job.round, "halt", 0, 3))
    writers = sorted(job.pending)
    assert writers == [0, 1, 3]
    told = [job.did(rank, Did(job.round, "save", 0, 3)) for rank in writers]
    assert asked(told[-1]) == [0]
    job.gone(1)
    assert asked(job.gone(0)) == [3], "and not rank 2, which has not"


def of_one_copy() -> MindioController:
    """Ranks 0 and 1 hold a half each, nobody else has it, and both save."""
    job = MindioController(2)
    for rank in range(2):
        job.hello(rank)
    for rank in range(2):
        job.replicas(rank, (ReplicaGroup((0, 1), 1),))
        job.status(rank, 3, updating=False)
    job.leave("somebody wants it to end")
    for rank in range(2):
        job.did(rank, Did(job.round, "halt", 0, 3))
    assert job.pending == {0, 1}
    return job


@pytest.mark.parametrize(
    "befalls", [lambda job: job.gone(0), lambda job: job.reported(0, ReportState.RS_UCE)], ids=["gone", "memory lost"]
)
def test_who_has_written_the_only_copy_is_not_needed_any_more(
    befalls: Callable[[MindioController], list[Effect]],
) -> None:
    job = of_one_copy()
    job.did(0, Did(job.round, "save", 0, 3))
    assert not [each for each in befalls(job) if isinstance(each, TrainingEnded)]
    (renamer,) = asked(job.did(1, Did(job.round, "save", 0, 3)))
    assert ended(answer(job, renamer)).saved == 3


def test_who_has_not_written_the_only_copy_takes_it_along() -> None:
    job = of_one_copy()
    job.did(1, Did(job.round, "save", 0, 3))
    end = ended(job.gone(0))
    assert (end.saved, end.unnamed) == (-1, -1)
    assert "nothing is saved" in end.reason


def test_where_nobody_answers_it_is_perhaps_saved() -> None:
    job = naming(2)
    job.gone(0)
    end = ended(job.gone(1))
    assert (end.saved, end.unnamed) == (-1, 3)
    assert "asked to name the checkpoint, rank 0 was lost before it answered; rank 1 was lost before" in end.reason
    assert "nothing is saved" not in end.reason


def test_only_so_many_ranks_are_asked() -> None:
    """Each may take three minutes not to answer, and there may be a thousand of them."""
    job = naming(9)
    assert asked(job.expired(job.round, MindioStage.RENAMING)) == [1]
    assert asked(answer(job, 1, 1)) == [2]
    end = ended(job.expired(job.round, MindioStage.RENAMING))
    assert end.unnamed == 3
    assert "rank 0 did not answer in time; rank 1 failed (code 1); rank 2 did not answer in time" in end.reason


def test_mindx_is_told_where_to_look() -> None:
    job = naming(1, MindXController)
    (result,) = [each.arguments for each in job.gone(0) if getattr(each, "action", "") == "report_result"]
    assert result[0] == FAILED
    assert "PERHAPS saved" in result[1]


def test_what_a_person_is_told() -> None:
    assert outcome(-1, -1) == ""
    assert outcome(3, -1) == "its state from after 3 updates is saved"
    perhaps = outcome(-1, 3)
    assert "PERHAPS saved" in perhaps
    assert "ttp_saved_checkpoints-step_3" in perhaps


@pytest.mark.parametrize(
    ("draft", "final", "code"),
    [(True, False, 0), (False, True, NAMED), (False, False, 1), (True, True, 1)],
    ids=["not renamed yet", "renamed", "neither is there", "an older one is in the way"],
)
def test_a_rank_sees_whether_it_is_renamed(tmp_path: Path, draft: bool, final: bool, code: int) -> None:
    """MindSpore's handler is one ``os.rename``, and asked a second time it raises."""
    rank = Processor(0, 2)
    before, behind = tmp_path / "ttp_saved_checkpoints-step_3_tmp", tmp_path / "ttp_saved_checkpoints-step_3"
    for folder, there in ((before, draft), (behind, final)):
        if there:
            (folder / "rank_0").mkdir(parents=True)
    rank.handlers["rename"] = (lambda step, ctx: os.rename(before, behind), None)  # noqa: PTH104 - as it does
    assert rank._do(RenameOrder(round=0, step=3)) == code


@pytest.mark.parametrize("returned", sorted(WORDS))
@pytest.mark.parametrize(
    "order", [RenameOrder(round=0, step=3), StopOrder(round=0, repair="retry")], ids=["rename", "stop"]
)
def test_what_a_handler_returns_is_no_word_of_ours(order: RenameOrder | StopOrder, returned: int) -> None:
    """A rename that had failed with such a code was taken for one that had been done before."""
    rank = Processor(0, 2)
    rank.handlers[order.name()] = (lambda *_: returned, None)
    assert rank._do(order) == 1
    rank.handlers[order.name()] = (lambda *_: returned + 10, None)
    assert rank._do(order) == returned + 10


def test_another_file_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    rank = Processor(0, 2)
    rank.handlers["rename"] = (lambda step, ctx: (tmp_path / "tracker").read_text(), None)
    assert rank._do(RenameOrder(round=0, step=3)) == 1
