"""Pipelines (PP x DP): whatever is killed, each rank ends with the memory of a plain run."""

from __future__ import annotations

import json
from pathlib import Path

import memories
import pytest
from memories import (
    EACH_ALONE,
    IN_MEMORY,
    Plain,
    ended_by_the_scheduler,
    ends_as,
    goes_on_divided_anew,
    went_back_together,
)
from running import Run

JOB = "pipelined.py"
PLAN = (
    "kill rank=2 step=0 phase=COMPUTE at=backward; "
    "hcce rank=3 step=1 phase=COMPUTE at=backward; "
    "uce rank=0 step=2 phase=COMPUTE at=backward target=param; "
    "stop rank=1 step=3 phase=COMPUTE at=forward; "
    "kill rank=1 step=5 phase=COMPUTE at=backward incarnation=1; "
    "kill rank=2 step=6 phase=COMPUTE at=forward incarnation=1; "
    "kill rank=0 step=7 phase=UPDATING at=start; "
    "kill rank=3 step=9 phase=APPLIED at=end"
)
OWN = ("--replicas", "[[0, 1], [2, 3]]")


def train(run_dir: Path, faults: str, *more: str, variant: str, **environ: str) -> Run:
    return memories.train(JOB, run_dir, faults, *more, variant=variant, **environ)


def shows(layout: str) -> list[pytest.MarkDecorator]:
    faults = ("killed", "connections cut", "hangs", "memory damaged")
    return [pytest.mark.shows(layout, fault, "in place") for fault in faults]


@pytest.mark.parametrize(
    ("variant", "more"),
    [
        pytest.param("replicate", (), marks=shows("PP, replicated")),
        pytest.param("own+onef", OWN, marks=[*shows("PP, plain stages"), pytest.mark.long]),
        pytest.param("replicate+onef", (), marks=pytest.mark.long),
        pytest.param("replicate+two", (), marks=pytest.mark.long),
        pytest.param("own", OWN, marks=pytest.mark.long),
    ],
)
def test_kills(run_dir: Path, torchrun: Plain, variant: str, more: tuple[str, ...]) -> None:
    """In a schedule's first step its stages tell each other what they send; a new process waits for that."""
    run = train(run_dir, PLAN, *more, variant=variant)
    ends_as(run, torchrun(variant))
    assert run.recoveries() == 8, run.explain()


def test_no_stage_is_blamed_for_what_it_was_sent(run_dir: Path, torchrun: Plain) -> None:
    """Rank 0 computes otherwise once, in a step that is computed twice, so the next stage of its pipeline does as well.
    Their collectives are others, so no place in one of them is before or behind one in the other.
    """
    plan = "flip rank=0 step=5 index=3 mask=0x40000000 target=activation"
    run = train(run_dir, plan, variant="replicate", RESILIENT_VERIFY_EVERY="2")
    ends_as(run, torchrun("replicate"))
    (told,) = run.of("deviates")
    assert told["detail"]["ranks"] == [0, 2]
    assert "rank" not in told
    assert len(run.of("spawned")) == 4, "nobody is killed for that"


@pytest.mark.long
@pytest.mark.shows("PP, sharded", "killed", "back")
@pytest.mark.shows("PP, sharded", "connections cut", "in place")
@pytest.mark.shows("PP, sharded", "hangs", "back")
@pytest.mark.shows("PP, sharded", "memory damaged", "back")
@pytest.mark.shows("PP, sharded", "no holder left", "back")
def test_stages_that_are_divided(run_dir: Path, torchrun: Plain) -> None:
    run = train(run_dir, EACH_ALONE, *IN_MEMORY, variant="shard+onef", RESILIENT_HANG_TIMEOUT_S="5")
    ends_as(run, torchrun("shard+onef"))
    went_back_together(run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "more"),
    [
        pytest.param("replicate", (), marks=pytest.mark.shows("PP, replicated", "no holder left", "back")),
        pytest.param("own", OWN, marks=pytest.mark.shows("PP, plain stages", "no holder left", "back")),
    ],
)
def test_both_who_hold_a_stage_are_lost(run_dir: Path, torchrun: Plain, variant: str, more: tuple[str, ...]) -> None:
    plan = "; ".join(f"kill rank={rank} step=7 phase=UPDATING" for rank in (2, 3))
    run = train(run_dir, plan, *IN_MEMORY, *more, variant=variant)
    ends_as(run, torchrun(variant))
    assert len(run.of("restart_all")) == 1, run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {"memory"}, run.explain()


@pytest.mark.parametrize(
    ("variant", "told"),
    [
        pytest.param("replicate+untold", "was not told its shapes", marks=pytest.mark.long),
        pytest.param(
            *("ddp", "is wrapped by DistributedDataParallel"),
            marks=pytest.mark.shows("PP, stages of DDP", "all", "refused"),
        ),
        ("own", "say which ranks hold the same: Session(replicas=[...])"),
    ],
)
def test_refused_at_the_start(run_dir: Path, variant: str, told: str) -> None:
    run = train(run_dir, "", variant=variant)
    assert run.code == 2, run.explain()
    assert told in run.err


def test_a_schedule_that_is_made_later(run_dir: Path) -> None:
    """It can be refused only where it matters."""
    run = train(run_dir, "kill rank=2 step=4 phase=COMPUTE at=forward", variant="replicate+untold+late")
    assert run.code == 1, run.explain()
    assert "was not told its shapes" in run.err
    assert not list((run_dir.parent / "out").glob("*")), "nobody has come to the end"


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "more"),
    [
        pytest.param("replicate", (), marks=pytest.mark.shows("PP, replicated", "started again", "goes on")),
        pytest.param("own", OWN, marks=pytest.mark.shows("PP, plain stages", "started again", "goes on")),
        pytest.param("shard", (), marks=pytest.mark.shows("PP, sharded", "started again", "goes on")),
    ],
)
def test_asked_to_end_it_goes_on_from_storage(
    run_dir: Path, torchrun: Plain, variant: str, more: tuple[str, ...]
) -> None:
    ended_by_the_scheduler(JOB, run_dir, *more, variant=variant)
    run = train(run_dir, "", *more, variant=variant)
    ends_as(run, torchrun(variant))
    assert {event["detail"]["source"] for event in run.of("restored")} == {"storage"}, run.explain()


@pytest.mark.long
@pytest.mark.shows("PP, replicated", "divided anew", "goes on")
@pytest.mark.shows("PP, sharded", "divided anew", "goes on")
@pytest.mark.parametrize(
    "ways",
    [
        [("shard+counting", 4), ("shard+counting", 2), ("replicate+counting", 4)],
        pytest.param([("replicate", 4), ("shard", 4), ("replicate", 2)], marks=pytest.mark.long),
        pytest.param([("replicate+counting", 2), ("shard+counting", 4)], marks=pytest.mark.long),
    ],
    ids=lambda ways: " ".join(f"{variant}-{ranks}" for variant, ranks in ways),
)
def test_it_goes_on_divided_in_another_way(run_dir: Path, ways: list[tuple[str, int]]) -> None:
    """A stage goes on from what was its own, however many ranks shared it; buffers differ from stage to stage."""
    goes_on_divided_anew(JOB, run_dir, ways)


def test_stages_are_not_cut_anew(run_dir: Path) -> None:
    run = train(run_dir, "", "--steps", "2", "--save", "1", variant="shard")
    assert run.code == 0, run.explain()
    run = train(run_dir, "", variant="replicate+two")
    assert run.code == 2, run.explain()
    assert "none of them had the parameters that this one has" in run.err
    assert "the stages have to be the same" in run.err


@pytest.mark.long
@pytest.mark.shows("PP, plain stages", "divided anew", "goes on")
def test_plain_stages_on_fewer_ranks(run_dir: Path) -> None:
    def told(ranks: int) -> tuple[str, str]:
        half = ranks // 2
        return "--replicas", json.dumps([[*range(half)], [*range(half, ranks)]])

    goes_on_divided_anew(JOB, run_dir, [("own+counting", 4), ("own+counting", 2)], told)
