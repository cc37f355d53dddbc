"""Schedules of ``torch.distributed.pipelining`` (PP).

In a schedule's first step its stages tell each other what they will send. A new process waits for these messages,
which the others have sent long ago; so behind a recovery all ranks begin with that again. Where the stages were told
what they will be given (``input_args``, ``output_args``), that is all there is to it. Where not, torch has each stage
make a forward and a backward pass of its own first, which changes buffers and whatever else a forward pass changes:
done again it would be another training, so that is refused (decision 51).

Nobody knows the schedules but who has made them. They are looked for among all objects, in some 50 ms of a million,
and only where the script has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from resilient_train.errors import UsageError
from resilient_train.frameworks.torch.watching.listed_objects import instances_of

_OF_SEVERAL_STAGES = ("backward_counter", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages")
_OF_2_15 = ("_deferred_stages", "_finalized_stages")
_OF_A_STEP = ("_internal_losses", *_OF_SEVERAL_STAGES, *_OF_2_15)
"""Of a schedule: what it gathers while it makes a step. All but the first: where a rank has several stages."""
_NOTHING: set[Any] = set()
_MODULE = "torch.distributed.pipelining.schedules"


def problem() -> str:
    """What can't be recovered of a schedule of this process; empty if all can."""
    return next(filter(None, map(_problem_of, _schedules())), "")


def begin_anew() -> None:
    """All ranks go on behind a recovery. Raises UsageError for a schedule that can't."""
    for schedule in _schedules():
        if found := _problem_of(schedule):
            raise UsageError(found)
        several = "s" if hasattr(schedule, "_stages") else ""
        for way in ("forward", "backward"):
            name = f"_stage{several}_{way}_initialized"
            assert hasattr(schedule, name)
            setattr(schedule, name, False)
        schedule._p2p_initialized = False  # torch 2.15: neighbours greet each other, which a new process does too
        # Of a step that was cut; the next one would take it for its own, or have too many.
        for name in _OF_A_STEP:
            getattr(schedule, name, _NOTHING).clear()
        for stage in _stages_of(schedule):
            stage.args_recv_info.clear()
            stage.grad_recv_info.clear()
            stage._gradient_reduction_handle = None  # torch 2.15 would wait for it


def _schedules() -> Iterator[Any]:
    module = sys.modules.get(_MODULE)
    if module is not None:
        yield from instances_of(module._PipelineSchedule)


def _stages_of(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def _problem_of(schedule: Any) -> str:
    modes = sys.modules[_MODULE].InferenceMode
    for stage in _stages_of(schedule):
        told = f"stage {stage.stage_index} of a pipeline ({type(schedule).__name__})"
        if isinstance(stage.submod, DistributedDataParallel):
            return (
                f"{told} is wrapped by DistributedDataParallel, whose buckets could not be laid out again, since the "
                "schedule has it reduce gradients of passes that it knows nothing of: use fully_shard or replicate "
                "(torch.distributed._composable.replicate_with_fsdp)"
            )
        meta = getattr(stage, "_user_meta", None)  # a stage that was traced knows all shapes
        if meta is not None and modes.needs_dynamic(meta, schedule._has_backward):
            return (
                f"{told} was not told its shapes, so torch makes a forward and a backward pass more in the first step, "
                "which can't be had again in a new process: give each PipelineStage its input_args and output_args "
                "(of one microbatch, on the meta device; if these are DTensors, input_grads and output_grads too)"
            )
    return ""
