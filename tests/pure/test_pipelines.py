"""Schedules of pipelines are found, wherever they are, and begin anew."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch import nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from resilient_train.errors import UsageError  # noqa: E402
from resilient_train.frameworks.torch.sharding import pipelines  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("as_in_a_fork")]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """As if this were the first of two; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def stage(module: nn.Module, number: int, count: int, *, told: bool = True) -> PipelineStage:
    shapes: dict[str, Any] = {}
    if told:
        given, made = (torch.empty(3, 4, device="meta") for _ in range(2))
        shapes = {"input_args": given.requires_grad_(number > 0), "output_args": made.requires_grad_()}
    return PipelineStage(module, number, count, torch.device("cpu"), **shapes)


def test_they_begin_anew(two_ranks: None) -> None:
    one: Any = ScheduleGPipe(stage(nn.Linear(4, 4), 0, 2), 2, loss_fn=nn.functional.mse_loss)
    stages: list[Any] = [stage(nn.Linear(4, 4), number, 4) for number in (0, 2)]
    several: Any = ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.functional.mse_loss)
    one._stage_forward_initialized = several._stages_backward_initialized = True
    one._internal_losses.append(torch.zeros(()))
    several.unsharded_stages.add(0)
    several._deferred_stages = {2}
    one._p2p_initialized = True
    # What a step that was cut was about to receive: torch 2.15 refuses to begin another one beside it.
    one._stage.grad_recv_info[0] = stages[1].args_recv_info[1] = (SimpleNamespace(buffer=torch.ones(3, 4)),)
    stages[0]._gradient_reduction_handle = object()
    assert not pipelines.problem()
    pipelines.begin_anew()
    assert not one._stage_forward_initialized
    assert not several._stages_backward_initialized
    assert not one._internal_losses
    assert not several.unsharded_stages
    assert not several._deferred_stages
    assert not one._p2p_initialized
    assert not any((*one._stage.grad_recv_info.values(), *stages[1].args_recv_info.values()))
    assert stages[0]._gradient_reduction_handle is None


def test_what_a_script_has_frozen_is_found(two_ranks: None) -> None:
    schedule = ScheduleGPipe(stage(nn.Linear(4, 4), 0, 2), 2, loss_fn=nn.functional.mse_loss)
    schedule._stage_forward_initialized = True
    gc.freeze()
    try:
        pipelines.begin_anew()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert not schedule._stage_forward_initialized


def test_what_can_not_be_had_again_is_refused(two_ranks: None) -> None:
    untold = ScheduleGPipe(stage(nn.Linear(4, 4), 0, 2, told=False), 2, loss_fn=nn.functional.mse_loss)
    assert "stage 0 of a pipeline (ScheduleGPipe) was not told its shapes" in pipelines.problem()
    with pytest.raises(UsageError, match="give each PipelineStage its input_args and output_args"):
        pipelines.begin_anew()
    del untold
    gc.collect()
    wrapped = ScheduleGPipe(stage(DistributedDataParallel(nn.Linear(4, 4)), 0, 2), 2, loss_fn=nn.functional.mse_loss)
    assert "is wrapped by DistributedDataParallel" in pipelines.problem()
    del wrapped
    gc.collect()
    assert not pipelines.problem()
