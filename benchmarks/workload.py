"""The models that the benchmark jobs train. Everything is made from one seed, so that all ranks have the same.

How they are divided among ranks: ``ddp`` (not at all), ``zero`` (the optimizer's state), ``fsdp``, and ``hsdp`` (in two
parts, each held by half of the ranks).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WIDTH = 1024
LAYOUTS = ("ddp", "zero", "fsdp", "hsdp")
_HIDDEN = {"10m": 9, "21m": 20}
"""Layers of ``_WIDTH`` by ``_WIDTH``."""
_BLOCKS = 200


class Work(NamedTuple):
    """A model, and the one batch that it is trained on for ever."""

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def make(name: str) -> Work:
    """``tiny``: 10 k parameters, the step is nearly all overhead. ``10m``: 10 M parameters.
    ``21m``: 21.5 M, which is 258 MB of state with AdamW's moments. ``deep``: 1,000 modules, 800 small parameters, 1 M.

    All have dropout: a step that draws no random numbers would let the Session publish less than a real one does.
    """
    torch.manual_seed(0)
    if name == "tiny":
        layers: list[nn.Module] = [nn.Linear(64, 104), nn.GELU(), nn.Dropout(0.1), nn.Linear(104, 32)]
        return Work(nn.Sequential(*layers), torch.randn(8, 64), torch.randint(32, (8,)))
    if name == "deep":
        layers = [
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(_BLOCKS)
        ]
        return Work(nn.Sequential(*layers), torch.randn(8, 64), torch.randint(32, (8,)))
    layers = [nn.Linear(512, _WIDTH), nn.GELU()]
    for _ in range(_HIDDEN[name]):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1)]
    layers.append(nn.Linear(_WIDTH, 32))
    return Work(nn.Sequential(*layers), torch.randn(16, 512), torch.randint(32, (16,)))


def divided(work: Work, layout: str, backend: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model among all ranks, over groups of that backend, and its optimizer."""
    if layout in ("ddp", "zero"):
        group = dist.new_group(backend=backend)
        model: nn.Module = DistributedDataParallel(work.model, process_group=group)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh, model = _mesh(layout, backend), work.model
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if layout == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group, parameters_as_bucket_view=True, lr=1e-4
        )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _mesh(layout: str, backend: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    size = dist.get_world_size()
    if layout == "fsdp":
        return DeviceMesh.from_group(dist.new_group(backend=backend), "cpu", mesh_dim_names=("shard",))
    ranks = torch.arange(size).view(size // 2, 2)
    groups = [dist.new_subgroups_by_enumeration(each.tolist(), backend=backend)[0] for each in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, work: Work) -> None:
    """One step's body, the same with and without a Session."""
    loss = nn.functional.cross_entropy(model(work.inputs), work.targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
