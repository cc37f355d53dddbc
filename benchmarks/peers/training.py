"""What all systems train: the same model on the same batches; and the checkpoints of those that need them."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from journal import Journal
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload import Work, make

DIGEST_EVERY = {"tiny": 50, "10m": 10, "21m": 10}
"""Steps from one digest of the parameters to the next; it costs some 20 ms with 10 M of them."""
RANKS_AT_MOST = 64


class Training:
    """A model, and a batch for every step and rank.

    A batch, and the random numbers of its step (dropout), follow from step and rank alone. So whoever redoes a step
    with the right parameters gets the right result, also without keeping states of random number generators.
    """

    def __init__(self, name: str, journal: Journal) -> None:
        self._work = make(name)
        self._journal = journal
        self._digest_every = DIGEST_EVERY[name]
        self.model = self._work.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def batch(self, step: int, rank: int) -> Work:
        torch.manual_seed(step * RANKS_AT_MOST + rank)
        targets = torch.randint(32, self._work.targets.shape)
        return Work(self.model, torch.randn_like(self._work.inputs), targets)

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        batch = self.batch(step, rank)
        return nn.functional.cross_entropy(model(batch.inputs), batch.targets)

    def committed(self, step: int) -> None:
        """To be called when the update of this step has been applied."""
        self._journal.committed(step)
        if step % self._digest_every == 0:
            digest = 0
            for parameter in self.model.parameters():
                digest = zlib.crc32(parameter.detach().numpy(), digest)
            self._journal.digest(step, digest)


class Checkpoints:
    """One file, as in the tutorials of torchrun and of NVIDIA's library; it holds a whole checkpoint at any time."""

    def __init__(self, folder: Path, every: int) -> None:
        self._path = folder / "checkpoint.pt"
        self._every = every

    def due(self, step: int) -> bool:
        return bool(self._every) and (step + 1) % self._every == 0

    def save(self, step: int, **parts: Any) -> None:
        started = self._path.with_suffix(".new")
        torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, started)
        started.replace(self._path)

    def load(self, **parts: Any) -> int:
        """Fills the parts; returns the first step that is to be done."""
        if not self._path.exists():
            return 0
        found = torch.load(self._path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(found[name])
        return int(found["step"]) + 1


def train(
    training: Training,
    journal: Journal,
    rank: int,
    checkpoints: Checkpoints,
    *,
    saving: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Plain DDP from the last checkpoint on, until this process is ended. The group is there."""
    optimizer = training.optimizer
    step = checkpoints.load(model=training.model, optimizer=optimizer)
    model = DistributedDataParallel(training.model)
    journal.mark("ready")
    while True:
        training.loss(model, step, rank).backward()
        optimizer.step()
        training.committed(step)
        optimizer.zero_grad()
        after_step()
        if checkpoints.due(step) and rank == 0:
            with saving():
                checkpoints.save(step, model=training.model, optimizer=optimizer)
        step += 1
