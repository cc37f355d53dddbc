"""A small model whose optimizer's state is divided among ranks by torch's ZeroRedundancyOptimizer (ZeRO-1).

``ddp``: it is not divided. ``views``: parameters are views of one tensor for each rank. ``groups``: in two groups, of
which one has no weight decay. ``scaled``: with a GradScaler, which refuses one update. ``frozen``: some parameters are,
from a step on. ``warmed``: a pass before the loop leaves gradients behind. ``norm``: with BatchNorm. Else as
``hsdp.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from hsdp import Job, Net, bytes_of, main
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

REFUSED = 4
"""The step whose gradients are infinite."""
FROZEN = 4
"""The step in which some parameters are frozen."""


class WithNorm(Net):
    def __init__(self) -> None:
        super().__init__(recomputes=False)
        self.batch_norm = nn.BatchNorm1d(5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(super().forward(inputs))


class Zero(Job):
    def __init__(self, variant: frozenset[str]) -> None:
        self.variant, self.rank = variant, dist.get_rank()
        torch.manual_seed(0)
        net = WithNorm() if "norm" in variant else Net(recomputes=False)
        self.model = DistributedDataParallel(net, find_unused_parameters="frozen" in variant)
        parameters: Any = list(self.model.parameters())
        if "groups" in variant:
            plain = [each for each in parameters if each.dim() < 2]
            others = [each for each in parameters if each.dim() > 1]
            parameters = [{"params": others}, {"params": plain, "weight_decay": 0.0}]
        if "ddp" in variant:
            self.optimizers = [torch.optim.AdamW(parameters, lr=1e-2)]
        else:
            views = "views" in variant
            kind = torch.optim.AdamW
            self.optimizers = [ZeroRedundancyOptimizer(parameters, kind, parameters_as_bucket_view=views, lr=1e-2)]
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 50) for each in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if "scaled" in variant else None
        torch.manual_seed(1000 + self.rank)
        if "warmed" in variant:
            self.model(torch.ones(2, 10)).sum().backward()

    def body(self, number: int, session: Any = None, batch: Any = None) -> float:
        inputs, targets = batch or self.batch(number)
        (optimizer,) = self.optimizers
        last = "accumulate" not in self.variant or number % 2 == 1
        if "frozen" in self.variant and number == FROZEN:
            for parameter in self.model.module.blocks[1].parameters():
                parameter.requires_grad_(requires_grad=False)
        self.model.require_backward_grad_sync = last
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        if self.scaler is not None:
            factor = math.inf if number == REFUSED else 1.0
            self.scaler.scale(loss * factor).backward()
            self.scaler.unscale_(optimizer)
        else:
            loss.backward()
        if not last:
            return loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        self.schedulers[0].step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return loss.item()

    def held(self) -> Iterator[tuple[str, bytes]]:
        (optimizer,) = self.optimizers
        yield from super().held()
        yield from ((name, bytes_of(buffer)) for name, buffer in self.model.named_buffers())
        if self.scaler is not None:
            yield "scaler", repr(sorted(self.scaler.state_dict().items())).encode()
        for number, group in enumerate(optimizer.param_groups):
            settings = sorted((key, value) for key, value in group.items() if key != "params")
            yield f"group {number}", repr(settings).encode()

    def state_of(self, number: int, parameter: Any) -> Any:
        optimizer = self.optimizers[number]
        return getattr(optimizer, "optim", optimizer).state.get(parameter, {})

    def whole(self) -> Iterator[bytes]:
        """The parameters and the state of all of them, from whoever has it."""
        (optimizer,) = self.optimizers
        for rank in range(dist.get_world_size()):
            if "ddp" not in self.variant:
                optimizer.consolidate_state_dict(to=rank)  # what was put together for the rank before goes
            if rank == self.rank:
                state = optimizer.state_dict()["state"]
        for number, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
            yield bytes_of(parameter)
            yield from (bytes_of(value) for _, value in sorted(state[number].items()))


if __name__ == "__main__":
    main(Zero)
