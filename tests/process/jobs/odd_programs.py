"""Programs that are ordinary somewhere, and that a redo, or a new process, could get wrong unseen: one of each kind.

Several kinds (``codebook+cooling``) make one program: nets stand one behind the other.
"""

import argparse
import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("steps", type=int)
parser.add_argument("--save", action="store_true", help="keep a snapshot of each step in memory")
asked = parser.parse_args()
SAMPLES, BATCH = 48, 4


class Heads(nn.Module):
    """One of two is used in a step: the other keeps its gradient of zeros, and its moments go on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


class Codebook(nn.Module):
    """A moving average that is written past torch's version counters."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x - self.mean)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 6, sparse=True)
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.words((x[:, 0].abs() * 10).long() % 16))


class Versioned(nn.Linear):
    """Its state says from which version of the class it is, beside the tensors."""

    _version = 2

    def _load_from_state_dict(self, state: object, prefix: str, meta: dict[str, int], *rest: object) -> None:
        assert meta.get("version") == 2, meta
        super()._load_from_state_dict(state, prefix, meta, *rest)


class Cooling(nn.Module):
    """What changes in a forward pass is in no buffer, but in what torch calls extra state."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)
        self.heat = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.heat *= 0.97 - 0.01 * dist.get_rank()
        return self.linear(x) * self.heat

    def get_extra_state(self) -> dict[str, float]:
        return {"heat": self.heat}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.heat = state["heat"]


class Annealed(nn.Module):
    """What changes in a forward pass is in plain attributes, of the class at first; and in no state_dict()."""

    temperature = 1.0

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, 3), nn.Dropout(0.1)
        self._passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._passes += 1
        self.temperature *= 0.97
        return self.drop(self.linear(x)) * self.temperature / self._passes


class ActNorm(nn.Module):
    """Its parameters begin as the first batch has them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.linear = nn.Linear(width, 3)
        self.has_begun = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_begun:
            with torch.no_grad():
                first = x.mean(0)
                dist.broadcast(first, 0)
                self.shift.copy_(-first)
            self.has_begun = True
        return self.linear(x * self.scale + self.shift)


class Whitens(nn.Module):
    """What torch's linear algebra gives lies column by column, and is summed up so: a buffer of the rank's own."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)
        self.register_buffer("axes", torch.linalg.eigh(torch.eye(width))[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.axes = torch.linalg.eigh(x.T @ x + self.axes.T)[1]
        return self.linear(x @ self.axes) + self.axes.sum(1).mean()


class Columns:
    """Of NumPy's, in ``rank_state``: the same, and an array with fields."""

    def __init__(self) -> None:
        self.held = np.asfortranarray(np.eye(6, 31, dtype=np.float32))
        self.seen = np.zeros(3, dtype=[("step", "<i8"), ("at", "<f4", (2,))])

    def add(self, x: np.ndarray, step: int) -> float:
        self.held = np.asfortranarray(self.held + x.mean(0)[:, None])
        self.seen[step % 3] = step, (1.5, 2.5)
        return float(self.held.sum()) + float(self.seen["step"].sum())

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"held": self.held, "seen": self.seen}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.held, self.seen = state["held"], state["seen"]


class Bank(nn.Module):
    """A buffer that grows, from so many rows; or (None) one that the first forward pass makes."""

    def __init__(self, rows: int | None, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)
        if rows is not None:
            self.register_buffer("bank", torch.zeros(rows, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        if not hasattr(self, "bank"):
            self.register_buffer("bank", torch.zeros(2, 3))
        self.bank = torch.cat([self.bank, out.detach()])[-64:]
        return out - self.bank.mean(0)


class Scaled(DataLoader):
    """Makes something of the batches."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for (x,) in super().__iter__():
            yield [x / 255]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return iter([(each,) for each in DATA[dist.get_rank() :: dist.get_world_size()]])


class Shuffled(Sampler):
    """Batches in an order of its own generator's, which is none of the loader's."""

    def __init__(self) -> None:
        self.draws = torch.Generator().manual_seed(7 + dist.get_rank())

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES, generator=self.draws).tolist()
        return iter([order[at : at + BATCH] for at in range(0, SAMPLES, BATCH)])

    def __len__(self) -> int:
        return SAMPLES // BATCH


class Mines(Sampler):
    """Batches by what the training has found of their samples."""

    def __init__(self) -> None:
        self.found = torch.zeros(SAMPLES)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.found.argsort(stable=True).view(-1, BATCH).tolist())

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"found": self.found}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.found.copy_(state["found"])


class Forever:
    """Its first pass never ends, so each inner one draws its order in the middle of the training."""

    def __init__(self, inner: DataLoader) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while True:
            yield from self.inner


class Passes(Sampler):
    """Counts by itself how often it was gone through."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.passes)).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Noisy(TensorDataset):
    """Augments each sample by the global random numbers, which the bodies draw from as well."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        (x,) = super().__getitem__(index)
        return (x + torch.randn(6),)


class Counts:
    """The state of a hook, as PowerSGD's has some: what becomes of a gradient hangs on how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    @staticmethod
    def averaged(state: "Counts", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.calls += 1
        factor = 1 + state.calls / 128
        return allreduce_hook(dist.group.WORLD, bucket).then(lambda done: done.value() * factor)

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


dist.init_process_group("gloo")
torch.manual_seed(0)
DATA = torch.randn(SAMPLES, 6)
kinds = asked.kind.split("+")
plain = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 3))
makers = {
    "codebook": Codebook,
    "cooling": Cooling,
    "annealed": Annealed,
    "begins": ActNorm,
    "whitens": Whitens,
    "bank0": partial(Bank, 0),
    "bank1": partial(Bank, 1),
    "bank": partial(Bank, None),
}
chain = [makers[kind](3 if at else 6) for at, kind in enumerate(kind for kind in kinds if kind in makers)]
net = Heads() if "heads" in kinds else Words() if "words" in kinds else nn.Sequential(*chain) if chain else plain
unused = "heads" in kinds or "thaws" in kinds
model = DistributedDataParallel(net, broadcast_buffers=False, find_unused_parameters=unused)
if "fused" in kinds:  # the kernel goes through memory, so moments must lie there as weights do
    for each in (each for each in net.modules() if isinstance(each, nn.Linear)):
        each.weight.data = each.weight.data.T.contiguous().T
words, fused = "words" in kinds, "fused" in kinds
optimizer = (
    torch.optim.SGD(model.parameters(), lr=1e-2) if words else torch.optim.AdamW(model.parameters(), fused=fused)
)
data, state, rank_state, loader, scheduler = TensorDataset(DATA), {}, {}, None, None
if "counts" in kinds:
    counts = Counts()
    model.register_comm_hook(counts, counts.averaged)
    rank_state = {"counts": counts}
if "thaws" in kinds:
    model.register_comm_hook(None, fp16_compress_hook)
if "versions" in kinds:
    ema = Versioned(64, 512)
    state = {"ema": ema}
if "milestones" in kinds:
    parts = [LinearLR(optimizer, total_iters=4), MultiStepLR(optimizer, [6, 9])]
    scheduler = SequentialLR(optimizer, parts, milestones=[4])
if "scaled" in kinds:
    loader = Scaled(data, batch_size=BATCH, sampler=DistributedSampler(data))
if "stream" in kinds:
    loader = DataLoader(Stream(), batch_size=BATCH)
if "forever" in kinds:
    loader = Forever(DataLoader(data, batch_size=BATCH, shuffle=True))
if "passes" in kinds:
    loader = DataLoader(data, batch_size=BATCH, sampler=Passes())
if "noisy" in kinds or "noisy_class" in kinds:
    noisy = Scaled if "noisy_class" in kinds else DataLoader
    loader = noisy(Noisy(DATA), batch_size=BATCH, shuffle=True)
if "grows" in kinds:
    loader = DataLoader(data, batch_size=BATCH)
if "columns" in kinds:
    columns = Columns()
    rank_state = {"columns": columns}
if "shuffled" in kinds:
    batches = Shuffled()
    loader, rank_state = DataLoader(data, batch_sampler=batches), {"draws": batches.draws}
if "mines" in kinds:
    mines, data = Mines(), TensorDataset(DATA, torch.arange(SAMPLES))
    loader, rank_state = DataLoader(data, batch_sampler=mines), {"mines": mines}
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(1 + dist.get_rank())

with rt.Session(
    model=net if "inner" in kinds else model,
    optimizer=optimizer,
    scheduler=scheduler,
    loader=loader,
    state=state,
    rank_state=rank_state,
) as session:
    if asked.save:
        session.save_every(steps=1000, memory_steps=1)
    for step in session.steps(asked.steps):
        with step:
            if "thaws" in kinds and step.number in (0, 10):
                net[0].requires_grad_(step.number > 0)
            if "sets" in kinds and step.number == 4:
                for each in net.modules():
                    if isinstance(each, nn.Dropout):
                        each.p = 0.4
            x = step.batch[0] if loader is not None else torch.randn(BATCH, 6)
            if "evaluates" in kinds:  # the first pass must run in the mode that the step began with
                loss = model(x).pow(2).mean()
                model.eval()
                with torch.no_grad():
                    target = model.module(x)
                (loss + (model(x) - target.mean()).pow(2).mean()).backward()
                model.train()
            else:
                out = model(x, step.number // 2 % 2) if "heads" in kinds else model(x)
                scale = 1 + columns.add(x.numpy(), step.number) * 1e-3 if "columns" in kinds else 1
                (out.pow(2).mean() * scale).backward()
            if "mines" in kinds:
                mines.found[step.batch[1]] += out.detach().pow(2).mean(1)
            optimizer.step()
            optimizer.zero_grad(set_to_none="heads" not in kinds)
            if "grows" in kinds and step.number == 3:  # from the second pass on
                loader.batch_sampler.batch_size = 2 * BATCH
            if scheduler is not None:
                scheduler.step()
            if "versions" in kinds:
                with torch.no_grad():
                    ema.weight.mul_(0.9)
            if "freezes" in kinds and step.number == 3:
                net[0].eval()
                net[1].eval()
dist.destroy_process_group()
