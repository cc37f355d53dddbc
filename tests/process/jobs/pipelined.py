"""A small model in two stages of a pipeline, each of them on two ranks, which average their gradients (PP x DP).

``--variant``: how they do so (``replicate``, ``shard``, ``ddp``, and ``own`` for an all-reduce of the script's), and
``onef`` for another order of the passes, ``two`` for two stages on each rank; ``counting``: with buffers;
``untold``: stages do not know their shapes; ``late``: the schedule is made in the first step.
``--plain``: without a word of ours, for torchrun. At its end each rank writes the bytes that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hsdp
import torch
import torch.distributed as dist
from hsdp import bytes_of
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, PARTS = 16, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("seen", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.seen is not None:
            self.seen += 1
        return inputs + self.dropout(self.down(torch.relu(self.up(inputs))))


class Net(nn.Module):
    """A stage has some of the blocks, under the names of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(4)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            inputs = block(inputs)
        return inputs


class Job(hsdp.Job):
    def __init__(self, variant: frozenset[str]) -> None:
        self.variant = variant
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.model: Any = Net()
        self.schedulers: list[Any] = []
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
        self.stage_number = mesh["pp"].get_local_rank()
        self.data_rank = mesh["dp"].get_local_rank()
        self.group = mesh["dp"].get_group()
        for number in range(4):
            if (number % 2 if "two" in variant else number // 2) != self.stage_number:
                del self.model.blocks[str(number)]
            elif "counting" in variant:
                self.model.blocks[str(number)].seen = torch.tensor(100.0 * number)
        if "two" in variant:
            for block in self.model.blocks.values():
                replicate(block, mesh=mesh["dp"])
        elif "replicate" in variant:
            replicate(self.model, mesh=mesh["dp"])
        elif "shard" in variant:
            for block in self.model.blocks.values():
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(self.model, mesh=mesh["dp"])
        elif "ddp" in variant:
            self.model = DistributedDataParallel(self.model, process_group=self.group)
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-2)]
        group = mesh["pp"].get_group()

        def stage_of(module: Any, number: int, count: int) -> PipelineStage:
            shapes: dict[str, Any] = {}
            if "untold" not in variant:
                given, made = (torch.empty(BATCH // PARTS, WIDTH, device="meta") for _ in range(2))
                shapes = {"input_args": given.requires_grad_(number > 0), "output_args": made.requires_grad_()}
            return PipelineStage(module, number, count, torch.device("cpu"), group=group, **shapes)

        def schedule() -> Any:
            if "two" in variant:
                blocks = self.model.blocks.values()
                stages = [stage_of(block, self.stage_number + 2 * at, 4) for at, block in enumerate(blocks)]
                return ScheduleInterleaved1F1B(stages, PARTS, loss_fn=nn.functional.mse_loss)
            one = Schedule1F1B if "onef" in variant else ScheduleGPipe
            return one(stage_of(self.model, self.stage_number, 2), PARTS, loss_fn=nn.functional.mse_loss)

        self._make_schedule = schedule
        self._schedule = None if "late" in variant else schedule()
        torch.manual_seed(1000 + self.rank)

    @property
    def schedule(self) -> Any:
        self._schedule = self._schedule or self._make_schedule()
        return self._schedule

    def body(self, number: int, session: Any = None, batch: Any = None) -> float:
        """Returns this rank's loss, if it has one."""
        generator = torch.Generator().manual_seed(number * 100 + self.data_rank)
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        losses: list[torch.Tensor] = []
        if self.stage_number == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=inputs.roll(1, 1), losses=losses)
            assert len(losses) == PARTS
        if "own" in self.variant:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, group=self.group)
        (optimizer,) = self.optimizers
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    def whole(self) -> Iterator[bytes]:
        """Of all stages, by the names of their parameters."""
        held: dict[str, tuple[bytes, ...]] = {}
        for name, parameter in self.model.named_parameters():
            state = sorted(self.optimizers[0].state[parameter].items())
            tensors = [parameter, *(value for _, value in state)]
            held[name] = tuple(bytes_of(getattr(each, "full_tensor", lambda each=each: each)()) for each in tensors)
        held |= {name: (bytes_of(buffer),) for name, buffer in self.model.named_buffers()}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, held)
        found = {name: tensors for each in everywhere for name, tensors in each.items()}
        for _, tensors in sorted(found.items()):
            yield from tensors


if __name__ == "__main__":
    hsdp.main(Job)
