"""An optimizer whose state is divided among ranks (ZeRO-1): whatever is killed, each rank ends with the memory of a
plain run.
"""

from __future__ import annotations

from pathlib import Path

import memories
import pytest
import torch
import torch.distributed.checkpoint as dcp
from memories import (
    EACH_ALONE,
    IN_MEMORY,
    PLACES,
    Plain,
    ended_by_the_scheduler,
    ends_as,
    goes_on_divided_anew,
    plain_net,
    went_back_together,
)
from running import Run

JOB = "zero.py"
CUTS = "; ".join(f"hcce rank={number % 4} step={2 + number} phase={place}" for number, place in enumerate(PLACES))


def train(run_dir: Path, faults: str, *more: str, variant: str = "base", **environ: str) -> Run:
    return memories.train(JOB, run_dir, faults, *more, variant=variant, **environ)


@pytest.mark.shows("ZeRO-1", "connections cut", "in place")
def test_cuts_at_every_place(run_dir: Path, torchrun: Plain) -> None:
    """In the step, in its update and in the broadcasts behind that: nobody has lost anything."""
    run = train(run_dir, CUTS)
    ends_as(run, torchrun("base"))
    assert run.recoveries() == len(PLACES), run.explain()
    assert not run.of("restart_all"), run.explain()
    assert "the state is in 4 parts, and some are held by one rank alone" in run.err


@pytest.mark.shows("ZeRO-1", "killed", "back")
@pytest.mark.shows("ZeRO-1", "hangs", "back")
@pytest.mark.shows("ZeRO-1", "memory damaged", "back")
@pytest.mark.shows("ZeRO-1", "no holder left", "back")
def test_nobody_has_what_a_lost_rank_had(run_dir: Path, torchrun: Plain) -> None:
    """All go back to what is in memory: when one is killed, two at once, when memory is lost, when one hangs."""
    run = train(run_dir, EACH_ALONE, *IN_MEMORY, RESILIENT_HANG_TIMEOUT_S="5")
    ends_as(run, torchrun("base"))
    went_back_together(run)


@pytest.mark.long
def test_kills_at_every_place(run_dir: Path, torchrun: Plain) -> None:
    kills = [
        f"kill rank={number % 4} step={2 + number} phase={place} incarnation={number}"
        for number, place in enumerate(PLACES)
    ]
    run = train(run_dir, "; ".join(kills), *IN_MEMORY)
    ends_as(run, torchrun("base"))
    assert len(run.of("restart_all")) == len(PLACES), run.explain()


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "plain"),
    [
        ("views", "base"),
        ("groups", "groups"),
        ("scaled+groups", "scaled+groups"),
        ("accumulate+views", "accumulate"),
        ("undo", "base"),
        ("norm", "norm"),
        ("warmed", "warmed"),
    ],
)
def test_loops(run_dir: Path, torchrun: Plain, variant: str, plain: str) -> None:
    """Parameters that are views of one tensor, groups with settings of their own, a scaler that refuses an update."""
    plan = "; ".join(
        f"{what} rank={rank} step={step} phase={place}"
        for what, rank, step, place in (
            ("hcce", 1, 3, "COMPUTE at=backward"),
            ("hcce", 2, 5, "APPLIED at=start"),
            ("kill", 3, 7, "UPDATING at=start"),
            ("hcce", 0, 9, "APPLIED at=start incarnation=1"),
        )
    )
    run = train(run_dir, plan, *IN_MEMORY, variant=variant)
    ends_as(run, torchrun(plain))
    assert run.recoveries() == 3, run.explain()
    assert len(run.of("restart_all")) == 1, run.explain()


@pytest.mark.long
def test_parameters_that_are_frozen_in_a_step_that_is_redone(run_dir: Path, torchrun: Plain) -> None:
    """The views of those that are left lie in another tensor then."""
    plan = "norm rank=0 step=4 value=nan; hcce rank=1 step=6 phase=APPLIED at=start"
    run = train(run_dir, plan, variant="frozen+views", MS_ENABLE_TFT="{TRE:1,ARF:1,HCCE:1}")
    ends_as(run, torchrun("frozen+views"))
    assert [event["detail"]["strategy"] for event in run.of("fault")] == ["TRE", "HCCE"], run.explain()


@pytest.mark.shows("ZeRO-1", "started again", "goes on")
def test_asked_to_end_it_goes_on_from_storage(run_dir: Path, torchrun: Plain) -> None:
    ended_by_the_scheduler(JOB, run_dir, variant="base")
    run = train(run_dir, "")
    ends_as(run, torchrun("base"))
    assert {event["detail"]["source"] for event in run.of("restored")} == {"storage"}, run.explain()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.shows("ZeRO-1", "divided anew", "goes on")
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param([("groups+norm", 4), ("groups+norm", 3), ("groups+norm+ddp", 2)], marks=pytest.mark.long),
        [("groups+ddp", 2), ("groups", 4), ("groups", 1)],
    ],
    ids=lambda ways: " ".join(f"{variant}-{ranks}" for variant, ranks in ways),
)
def test_it_goes_on_divided_in_another_way(run_dir: Path, ways: list[tuple[str, int]]) -> None:
    """Among other numbers of ranks, or not at all; and torch's own reader finds one optimizer of all parameters."""

    expected = goes_on_divided_anew(JOB, run_dir, ways)
    assert read_by_torch(run_dir / "checkpoints" / "step_3", norm="norm" in ways[0][0]) == expected


def read_by_torch(checkpoint: Path, *, norm: bool) -> bytes:
    """The parameters in the order of their groups, each with its moments and its count of steps, in a process that has
    no group.
    """
    net = plain_net()
    if norm:
        net.batch_norm = torch.nn.BatchNorm1d(5)
    parameters = sorted(net.named_parameters(), key=lambda named: named[1].dim() < 2)
    named: dict[str, torch.Tensor] = {}
    for number, (name, parameter) in enumerate(parameters):
        named[f"model.0.module.{name}"] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            named[f"optimizer.0.{number}.{moment}"] = torch.zeros_like(parameter)
        named[f"optimizer.0.{number}.step"] = torch.zeros(())
    dcp.load(named, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    return b"".join(tensor.numpy().tobytes() for tensor in named.values())


def test_what_a_tail_may_publish_is_asked_for(run_dir: Path) -> None:
    run = train(run_dir, "", RESILIENT_TAIL_LOG_BYTES="4000")
    assert run.code == 2, run.explain()
    assert run.err.count("resilient-run: the job ends: optimizer: ZeroRedundancyOptimizer broadcasts up to") == 1
    assert "without which a cut connection there ends the job: set it to 5242880" in run.err
