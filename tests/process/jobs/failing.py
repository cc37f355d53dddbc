"""``train.py``, whose script fails by itself in step 5: ``--fail PLACE``, on all ranks or on ``--only`` one."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from train import Job, make_loader, parser

import resilient_train as rt

STEP = 5


class UnusualError(BaseException):
    """No Exception, as ``torch.distributed.checkpoint.CheckpointException`` is none."""


class Unreadable:
    """A loader one of whose batches can't be read."""

    def __init__(self, loader: Any, at: int) -> None:
        self.dataset, self.loader, self.at = loader, loader, at

    def __iter__(self) -> Any:
        for index, batch in enumerate(self.loader):
            if index == self.at:
                raise ValueError("the script's own")
            yield batch


class Failing(Job):
    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__(frozenset(asked.variant.split("+")), "")
        self.place, self.fails = asked.fail, asked.only in (-1, dist.get_rank())
        self.unusual = asked.unusual

    def may_fail(self, place: str, step: rt.Step) -> None:
        if step.number != STEP or self.place != place:
            return
        if place == "between":
            self.wait_for_others()
        if self.fails and self.unusual:
            raise UnusualError("the script's own")
        if self.fails:
            raise ValueError("the script's own")

    def wait_for_others(self) -> None:
        """Nobody is behind the update any more, where an error of this rank would cut it."""
        self.records.with_name(f"between{dist.get_rank()}").touch()
        while self.fails and len([*self.records.parent.glob("between*")]) < dist.get_world_size():
            time.sleep(0.001)

    def body(self, step: rt.Step) -> None:
        self.may_fail("body", step)
        if self.place == "exit" and self.fails and step.number == STEP:
            sys.exit(3)
        super().body(step)
        self.may_fail("end", step)

    def update(self, step: rt.Step, loss: torch.Tensor) -> None:
        if self.place == "update" and self.fails and step.number == STEP:
            self.optimizers[0].param_groups[0]["lr"] = "nonsense"
        super().update(step, loss)

    def after(self, step: rt.Step, loss: torch.Tensor) -> None:
        self.may_fail("tail", step)
        super().after(step, loss)

    def run_failing(self, steps: int) -> None:
        loader = make_loader(self.variant)
        if self.place == "loader" and self.fails:
            loader = Unreadable(loader, STEP)
        session = rt.Session(
            model=self.model,
            optimizer=self.optimizers,
            loader=loader,
            scheduler=self.schedulers,
            state={"ema": self.ema, "seen": self.seen},
            undo="undo" in self.variant,
        )
        with contextlib.suppress(ValueError) if self.place == "caught" else contextlib.nullcontext(), session:
            self.session = session
            for step in session.steps(steps):
                with step:
                    self.body(step)
                self.may_fail("between", step)
                self.may_fail("caught", step)


if __name__ == "__main__":
    options = parser()
    options.add_argument("--fail", required=True)
    options.add_argument("--unusual", action="store_true")
    options.add_argument("--only", type=int, default=-1)
    arguments = options.parse_args()
    dist.init_process_group("resilient")
    job = Failing(arguments)
    job.run_failing(arguments.steps)
    (job.records.with_name(f"behind_rank{dist.get_rank()}.txt")).write_text("here")
