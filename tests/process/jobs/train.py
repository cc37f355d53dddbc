"""The training job of the process tests: small, but with everything that is hard to repair bit for bit.

Dropout (torch's RNG), data noise from Python's and NumPy's RNG, BatchNorm (buffers of each rank's own), gradient
clipping, a scheduler, an EMA and a logged all-reduce after the update. ``--variant`` changes one thing, or several
(``two+stateful``).
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import resilient_train as rt
from resilient_train.config import read_link, read_settings
from resilient_train.errors import MemoryLimitError
from resilient_train.frameworks.torch import groups
from resilient_train.state.vault.client import Vault
from resilient_train.state.vault.slots import SlotPair

STUCK_SAMPLE = 60
"""Loaded by rank 1 of 3 in its sixth step, with the sampler's seed 3."""


class Noisy(Dataset):
    """Sample i is drawn from seed i, plus noise from the global generators; it says its own number.

    Without noise where a StatefulDataLoader keeps its workers: their random numbers are not those of before where a
    pass begins in a new process (docs/how-to/load-data.md).
    """

    def __init__(self, noise: float, stuck: int = -1, size: int = 96, *, deadly: bool = False) -> None:
        self.noise = noise
        self.size = size
        self.stuck = stuck
        self.deadly = deadly

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        if index == self.stuck:
            if self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        clean = torch.randn(12, generator=torch.Generator().manual_seed(index))
        noise = 0.0
        if self.noise:
            noise = self.noise * (random.random() + float(np.random.rand()))  # noqa: NPY002 - the global one is meant
        return index, clean + noise, index % 4


def build(variant: frozenset[str]) -> nn.Module:
    layers: list[nn.Module] = []
    width = 12
    for _ in range(4):
        layers += [nn.Linear(width, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2)]
        width = 48
    layers.append(nn.Linear(width, 4))
    model = nn.Sequential(*layers)
    if "unused" in variant:
        model.register_parameter("never_used", nn.Parameter(torch.ones(3)))
    if "early" in variant:
        model.register_parameter("followed", nn.Parameter(torch.ones(48, 12), requires_grad=False))
    return model


class Seen:
    """Samples, counted in the body."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


def survive_building(variant: frozenset[str]) -> None:
    """Not that process of rank 1 which the variant names: it has a group, and half a model."""
    link = read_link() if variant & {"unbuilt0", "unbuilt1"} else None
    if link is not None and link.rank == 1 and not link.attempt and f"unbuilt{link.incarnation}" in variant:
        os.kill(os.getpid(), signal.SIGKILL)


def wrap(model: nn.Module, variant: frozenset[str]) -> DistributedDataParallel:
    names = {"unused": "find_unused_parameters", "static": "static_graph", "view": "gradient_as_bucket_view"}
    names["lazy"] = "lazy_bucket_allocation"  # torch 2.15, or later; "manual" too
    flags = {flag: True for name, flag in names.items() if name in variant}
    return DistributedDataParallel(model, bucket_cap_mb=0.01, **flags)


def digest_of(model: nn.Module) -> str:
    parameters = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(parameters)).hexdigest()


def digest(*parts: Any) -> str:
    """Of all tensors and values in ``parts``, by other code than the library's own."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(parts)
    return found.hexdigest()


def no_memory(*_: object) -> SlotPair:
    raise MemoryLimitError("900 MB are missing")


def mute(rank: int) -> None:
    """torch's recorder of collectives raises on rank 0, and does not come back on rank 2."""

    def fail() -> bytes:
        if rank == 0:
            raise RuntimeError("the recorder is broken")
        while True:
            time.sleep(3600)

    if rank in (0, 2):
        groups._dump_fr_trace_json = fail


def make_loader(variant: frozenset[str]) -> DataLoader:
    link = read_link()
    faulty = variant & {"stuck", "unread"} and link is not None and link.rank == 1 and link.incarnation == 0
    noise, size = 0.0 if {"persistent", "stateful"} <= variant else 0.01, 24 if "short" in variant else 96
    data = Noisy(noise, stuck=STUCK_SAMPLE if faulty else -1, size=size, deadly="unread" in variant)
    kind: type[DataLoader] = DataLoader
    if "stateful" in variant:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    order = {"shuffle": True} if "shuffle" in variant else {"sampler": DistributedSampler(data, seed=3)}
    workers = 2 if "workers" in variant else 0
    return kind(data, batch_size=4, num_workers=workers, persistent_workers="persistent" in variant, **order)


class Job:
    def __init__(self, variant: frozenset[str], hold: str) -> None:
        self.variant = variant
        while hold and Path(hold).exists():
            time.sleep(0.01)
        torch.manual_seed(0)
        model = build(variant)
        survive_building(variant)
        self.model = wrap(model, variant)
        self.ema = build(variant)
        self.ema.load_state_dict(self.model.module.state_dict())
        self.seen = Seen()
        self.wrong = (-1, 0)
        parameters = list(self.model.parameters())
        half = len(parameters) // 2 if variant & {"two", "gan"} else len(parameters)
        self.optimizers = [torch.optim.AdamW(parameters[:half], lr=1e-2)]
        if half < len(parameters):
            self.optimizers.append(torch.optim.SGD(parameters[half:], lr=1e-2, momentum=0.9))
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 50) for o in self.optimizers]
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) if "scaler" in variant else None
        )
        rt.standby_point()
        link = read_link()
        rank = dist.get_rank()
        # The first process of rank 1 is the one that goes wrong, where a variant has one go wrong.
        self.faulty = link is not None and rank == 1 and link.incarnation == 0
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1000 + rank)
        self.records = Path(link.run_dir) / f"samples_rank{rank}.jsonl" if link else None
        self.others = dist.new_group(list(range(dist.get_world_size())))

    def end(self) -> str:
        """What this rank has at its end: all that the job trains, an EMA of it, and its random numbers."""
        stateful = [self.model.module, self.ema, self.seen, *self.optimizers, *self.schedulers]
        stateful += [self.scaler] if self.scaler else []
        return digest([each.state_dict() for each in stateful], torch.get_rng_state(), random.getstate())

    def look(self) -> None:
        """An evaluation, which changes nothing."""
        self.model.module.eval()
        with torch.no_grad():
            self.model.module(torch.ones(4, next(self.model.parameters()).shape[1]))
        self.model.module.train()

    def loss_of(self, batch: tuple) -> torch.Tensor:
        if "early" in self.variant:
            self.write_early(batch)
        return nn.functional.cross_entropy(self.model(batch[1]), batch[2])

    def write_early(self, batch: tuple) -> None:
        """In front of the update: a parameter that follows another one, a count, and the batch itself."""
        self.seen.samples += len(batch[0])
        batch[1].mul_(0.9)
        with torch.no_grad():
            self.model.module.followed.lerp_(self.model.module[0].weight, 0.1)
        self.model.module[0].bias.data.add_(self.model.module.followed[:, 0] / 64)

    def body(self, step: rt.Step) -> None:
        skip = "skip" in self.variant and self.faulty and step.number == 5
        with self.model.no_sync() if skip else contextlib.nullcontext():
            self.train(step)

    def train(self, step: rt.Step) -> None:
        loss = self.loss_of(step.batch)
        if dist.get_rank() == self.wrong[0] and step.number >= self.wrong[1]:
            loss = loss * (1 + 2**-12)
        if "nan" in self.variant and self.faulty and step.number == 4 and step.attempt == 0:
            loss = loss * float("nan")
        if "check" in self.variant:
            self.session.check(loss)
        if "before" in self.variant:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        if "manual" in self.variant:  # the backward pass ends as the last one did
            loss.backward()
            if self.model.require_manual_backward_finalization:
                self.model.finalize_backward()
            self.model.require_manual_backward_finalization = step.number % 3 > 0
        elif "accumulate" in self.variant:
            (loss / 2).backward()
            if step.number % 2 == 0:
                return
        elif self.scaler is not None:
            # A scale that overflows now and then: the scaler refuses the update and the step still counts.
            factor = float("inf") if step.number % (4 if "often" in self.variant else 7) == 3 else 1.0
            self.scaler.scale(loss * factor).backward()
        else:
            loss.backward()
        self.update(step, loss)

    def update(self, step: rt.Step, loss: torch.Tensor) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizers[0])
            if "clipped" in self.variant:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.scaler.step(self.optimizers[0])
            self.scaler.update()
        else:
            if "unclipped" in self.variant:
                self.session.check(norm=True)
            else:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            for number, optimizer in enumerate(self.optimizers):
                if number and "gan" in self.variant:
                    optimizer.zero_grad()
                    self.loss_of(step.batch).backward()
                if "leave-out" in self.variant and step.number == 3:
                    optimizer.zero_grad()
                optimizer.step()
        if "before" not in self.variant:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self.after(step, loss)

    def after(self, step: rt.Step, loss: torch.Tensor) -> None:
        for scheduler in self.schedulers:
            scheduler.step()
        if "early" not in self.variant:
            self.average()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        counts = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([float(step.number)]), group=self.others)
        if self.records is not None:
            line = {
                "step": step.number,
                "ids": step.batch[0].tolist(),
                "mean": mean.item(),
                "counts": torch.cat(counts).tolist(),
            }
            with self.records.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def average(self) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.ema.parameters(), self.model.module.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    def wait_for_standby(self, count: int) -> None:
        """Until there is one, and, where it waits in this script, until that has come to pass ``count`` times."""
        assert self.records is not None
        events = self.records.with_name("events.jsonl")
        waits = read_settings().standby_depth != "forked"
        while events.read_bytes().count(b'"standby_waits"' if waits else b'"standby_ready"') < (count if waits else 1):
            time.sleep(0.02)

    def wait_for_storage(self, session: rt.Session, commits: int) -> None:
        """Until the checkpoint of this update is written, or was left out."""
        with session.slow("waiting for storage"):
            while session._driver._link.peers.settled < commits:
                time.sleep(0.005)

    def show_start(self, step: int) -> None:
        """Writes with what parameters and random numbers this process begins to train."""
        assert self.records is not None
        told = {"step": step, "parameters": digest_of(self.model.module), "random": torch.get_rng_state().sum().item()}
        with self.records.with_name(f"starts_rank{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")

    def pause(self, session: rt.Session, step: int, does: str) -> None:
        """What the function of ``session.on_pause`` does, beside saying that it was called."""
        assert self.records is not None
        with self.records.with_name(f"pauses_rank{dist.get_rank()}.txt").open("a") as file:
            file.write(f"{step}\n")
        torch.rand(3)
        random.random()
        if does == "resume":
            session.resume()
        elif does == "fail":
            raise ValueError("the disk is full")
        elif does == "reduce":
            dist.all_reduce(torch.ones(1))
        elif does == "write":
            next(self.model.parameters()).data.add_(1)
        elif does == "lower":
            self.optimizers[0].param_groups[0]["lr"] *= 0.5

    def run(self, asked: argparse.Namespace) -> None:
        self.wrong = tuple(asked.wrong)
        with rt.Session(
            model=self.model,
            optimizer=self.optimizers,
            loader=make_loader(self.variant),
            scheduler=self.schedulers,
            scaler=self.scaler,
            state={"ema": self.ema, "seen": self.seen},
            undo=bool(self.variant & {"gan", "undo"}),
            on_anomaly="skip" if "leaves" in self.variant else "redo",
        ) as session:
            self.session = session
            if "poor" in self.variant and dist.get_rank() == 1:
                Vault.reserve = no_memory
            if asked.save_mode:
                session.save_every(**json.loads(asked.save_mode))
            elif asked.save:
                session.save_every(steps=asked.save)
            if "mute" in self.variant:
                mute(dist.get_rank())
            if asked.on_pause:
                session.on_pause(lambda step: self.pause(session, step, asked.on_pause))
            began: int | None = None
            for step in session.steps(asked.steps):
                if step.number in asked.pause_in:
                    session.pause()
                if asked.show_start and step.attempt == 0 and self.records is not None:
                    self.show_start(step.number)
                    asked.show_start = False
                with step:
                    held = asked.pace and step.number == (asked.steps - 1 if asked.hold_in < 0 else asked.hold_in)
                    while held and not Path(asked.pace).exists():
                        time.sleep(0.01)
                    self.body(step)
                if "early" in self.variant:  # it does not ask whether the step is done
                    self.average()
                if asked.pace and not Path(asked.pace).exists():
                    time.sleep(0.15 if step.number < 20 else 0.4)  # so that few steps are enough for a long story
                time.sleep(asked.rest_s)
                began = step.number if began is None else began
                if asked.await_saves and step.number - 1 > began and (step.number - 1) % asked.save == 0:
                    self.wait_for_storage(session, step.number - 1)
                if step.number == asked.saved_by[0]:
                    self.wait_for_storage(session, asked.saved_by[1])
                if step.number in asked.standby_at and step.done:
                    with session.slow("waiting for a standby"):
                        self.wait_for_standby(asked.standby_at.index(step.number) + 1)
                if "slow" in self.variant and step.number == 5 and dist.get_rank() == 1:
                    with session.slow("evaluation"):
                        time.sleep(3)
                if step.number == asked.leave_at and step.done:
                    break
                if asked.between and step.done and step.number % 3 == 2:
                    dist.barrier()
                if "looks" in self.variant and step.done and step.number % 3 == 2:
                    self.look()


def parser() -> argparse.ArgumentParser:
    """What a job can be asked to do; by default, none of it."""
    found = argparse.ArgumentParser()
    found.add_argument("--steps", type=int, default=20)
    found.add_argument("--variant", default="base")
    found.add_argument("--between", action="store_true")
    found.add_argument("--leave-at", type=int, default=-1, help="leave the loop behind this step")
    found.add_argument("--save", type=int, default=0, help="a checkpoint after every so many updates")
    found.add_argument("--await-saves", action="store_true", help="go on when storage has taken what is due")
    found.add_argument(
        "--saved-by", type=int, nargs=2, default=(-1, 0), help="wait behind this step for that update's checkpoint"
    )
    found.add_argument("--save-mode", default="", help="the arguments of save_every, in JSON")
    found.add_argument("--show-start", action="store_true", help="write down what the loop begins with")
    found.add_argument("--pace", default="", help="go slowly until this file exists, and not to the end")
    found.add_argument("--hold-in", type=int, default=-1, help="nor beyond this step")
    found.add_argument("--rest-s", type=float, default=0.0, help="rest so long behind each step")
    found.add_argument("--standby-at", type=int, nargs="*", default=[], help="wait for a standby behind this step")
    found.add_argument("--on-pause", default="", help="what a function does in a pause: look, resume, fail, ...")
    found.add_argument("--pause-in", type=int, nargs="*", default=[], help="ask for a pause in these steps")
    found.add_argument(
        "--wrong", type=int, nargs=2, default=(-1, 0), help="this rank always computes otherwise, from this step on"
    )
    found.add_argument("--hold", default="", help="do not begin while this file exists")
    return found


if __name__ == "__main__":
    arguments = parser().parse_args()
    dist.init_process_group("resilient")
    job = Job(frozenset(arguments.variant.split("+")), arguments.hold)
    job.run(arguments)
    if job.records is not None:
        job.records.with_name(f"end_rank{dist.get_rank()}.txt").write_text(job.end())
    dist.destroy_process_group()
