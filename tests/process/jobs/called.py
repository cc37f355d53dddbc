"""A loop that owns its step, by ``session.call``; and the same one by ``with step:``, to compare.

Dropout, BatchNorm, clipping, a scheduler and a logged all-reduce after the update. The batch is made from the number of
the step. ``--draws``: the loop draws random numbers between two steps. ``--evaluates``: it runs
the model without gradients there.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link
from resilient_train.frameworks.roles import Fingerprint

BATCH: Any = None


def once_more(body: Callable[[], float]) -> Callable[[], float]:
    """As decorators do."""

    @functools.wraps(body)
    def wrapped() -> float:
        return body()

    return wrapped


class Seen:
    """Samples, counted by the loop between two steps; in a table of so many places."""

    def __init__(self, places: int) -> None:
        self.table = torch.zeros(places)

    def count(self) -> None:
        self.table += 8

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"table": self.table}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.table.copy_(state["table"])


class Job:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        torch.manual_seed(0)
        layers = [
            nn.Linear(12, 48),
            nn.BatchNorm1d(48),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(48, 48),
            nn.Linear(48, 4),
        ]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1000 + dist.get_rank())
        link = read_link()
        self.seen = Seen(asked.places)
        self.runs = Path(link.run_dir) / f"runs_rank{dist.get_rank()}.jsonl" if link else None

    def batch_of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        seeded = torch.Generator().manual_seed(100 * number + dist.get_rank())
        return torch.randn(8, 12, generator=seeded), torch.randint(4, (8,), generator=seeded)

    def body(self, number: int, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        self.tell(number, "begins")
        every = self.asked.accumulate
        if self.asked.counts_in_bodies:
            self.seen.count()
        last = number % every == every - 1
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        if not last:
            with contextlib.nullcontext() if self.asked.changes else self.model.no_sync():
                (loss / every).backward()
            return loss.item()
        (loss / every).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.tell(number, "ends")
        return mean.item()

    @contextlib.contextmanager
    def in_front(self, number: int) -> Iterator[None]:
        """Of a call, and around it: what a redo does not run again, and a new process does once too often."""
        if not self.asked.changes:
            yield
            return
        place = number % self.asked.accumulate
        first, norm, _, dropout, *_ = self.model.module
        dropout.p = 0.1 + 0.2 * place
        self.optimizer.param_groups[0]["lr"] *= 0.97
        self.seen.count()
        norm.running_mean += 0.01
        first.weight.requires_grad_(place != 1)
        for parameter in self.model.parameters() if place else ():
            if parameter.grad is not None:
                parameter.grad *= 1.5
        last = place == self.asked.accumulate - 1
        with contextlib.nullcontext() if last else self.model.no_sync():
            yield

    def hang_on(self) -> None:
        first, _, activation, *_ = self.model.module
        forward = activation.forward
        activation.forward = lambda x: 1.25 * forward(x)
        first.register_forward_hook(lambda _module, _given, output: 0.75 * output)

    def between(self, number: int) -> None:
        if self.asked.draws:
            torch.rand(1 + number)
        if self.asked.evaluates and number % 3 == 2:  # by DDP's wrapper, as a Trainer does
            with torch.no_grad():
                self.model.eval()(torch.ones(4, 12))
            self.model.train()
        every = self.asked.accumulate
        if number % every == every - 1 and number % 3 == 2:
            dist.barrier()
        if number >= self.asked.counts_from >= 0 and number % every < every - 1:
            self.seen.count()
        if number == self.asked.dies_between:
            self.die_between()

    def die_between(self) -> None:
        """Rank 1, when the other one is there too; that one goes on when it has heard of the death, in no body."""
        link = read_link()
        assert link is not None
        there = Path(link.run_dir, "between")
        if link.rank == 1 and not link.incarnation:
            while not there.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        there.touch()
        while link.rank == 0 and not self.session._driver._peers.stop_generation:
            time.sleep(0.001)

    def go_wrong(self, session: rt.Session) -> None:
        """In step 1, once; of the first window, unless each step updates."""
        batch = self.batch_of(1)
        match self.asked.wrong:
            case "nested":
                session.call(session.call, self.body, 1, batch)
            case "mixed":
                next(session.steps(12))
            case "between":
                session.call(self.body, 1, batch)
                dist.barrier()
            case "again":
                with contextlib.suppress(ZeroDivisionError):
                    session.call(lambda: 1 // 0)
                session.call(self.body, 1, batch)
            case "tail":

                def body() -> None:
                    self.body(1, batch)
                    raise ZeroDivisionError

                try:
                    session.call(body)
                except ZeroDivisionError:
                    print("passed", flush=True)

    def tell(self, number: int, what: str) -> None:
        if self.runs is not None:
            with self.runs.open("a") as file:
                file.write(json.dumps([number, what]) + "\n")

    def run(self) -> None:
        made = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "state": {"seen": self.seen},
        }
        with rt.Session(**made, undo=self.asked.undo) as session:
            self.session = session
            if self.asked.save:
                session.save_every(steps=self.asked.save)
            if self.asked.way == "steps":
                for step in session.steps(self.asked.steps):
                    with self.in_front(step.number), step:
                        self.body(step.number, self.batch_of(step.number))
                    if step.done:
                        self.between(step.number)
                return
            start = session.position
            if self.asked.hangs:
                self.hang_on()
            print(f"rank {dist.get_rank()} begins at {start}", flush=True)
            for number in range(start.step, self.asked.steps):
                place = number + (self.asked.strays and start.step > 0)
                if number == 1 and self.asked.wrong:
                    self.go_wrong(session)
                    continue
                with self.in_front(number):
                    loss = self.call(number, self.batch_of(place))
                assert isinstance(loss, float)
                assert session.position.step == number + 1
                self.between(number)
            if self.asked.one_leaves_late and dist.get_rank() == 0:
                self.take_long_to_leave()

    def call(self, number: int, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        global BATCH
        if not self.asked.names:
            return self.session.call(self.body, number, batch=batch)
        BATCH = batch
        return self.session.call(once_more(lambda: sum(self.body(each, BATCH) for each in (number,))))

    def take_long_to_leave(self) -> None:
        """As if the state, of which a digest is taken at the end, were large."""
        state = self.session._driver._engine.state
        fingerprint = state.fingerprint

        def taken_slowly() -> Fingerprint:
            time.sleep(0.5)
            return fingerprint()

        state.fingerprint = taken_slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--way", default="call", choices=["call", "steps"])
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--draws", action="store_true")
    parser.add_argument("--evaluates", action="store_true")
    parser.add_argument("--strays", action="store_true", help="a new process takes other batches")
    parser.add_argument("--changes", action="store_true", help="many things in front of each call")
    parser.add_argument("--hangs", action="store_true", help="a hook, and another forward, in front of the first call")
    parser.add_argument("--names", action="store_true", help="bodies get all by variables that an inner function names")
    parser.add_argument("--wrong", default="", help="what is done in step 1")
    parser.add_argument("--counts-from", type=int, default=-1, help="from this step on, behind calls without update")
    parser.add_argument("--counts-in-bodies", action="store_true")
    parser.add_argument("--dies-between", type=int, default=-1, help="rank 1, behind this step's call")
    parser.add_argument("--places", type=int, default=1, help="what it counts in")
    parser.add_argument("--one-leaves-late", action="store_true", help="rank 0, when its loop is over")
    parser.add_argument("--undo", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("resilient")
    Job(arguments).run()
    dist.destroy_process_group()
