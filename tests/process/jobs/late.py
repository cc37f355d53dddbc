"""A loop whose later look at a step finds it wrong: a parameter was changed on all ranks alike, by a machine or not.

In step ``--at`` all ranks multiply their gradients by ``--factor``, each time or (``--once``) the first time.
``--look`` steps later, or when a wrong checkpoint is written, rank 0 says so. Every ``--save`` updates there is a
checkpoint, if storage is ready. From step ``--stage`` on nothing is dropped out, which a new process does as well, and
nobody takes back.
With ``--nan`` the gradients are right, and rank 1 gives NaN for the loss of that step, behind its update; with
``--raises`` it raises what asks for the step once more.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--at", type=int, default=-1)
parser.add_argument("--factor", type=float, default=2.0)
parser.add_argument("--look", type=int, default=5)
parser.add_argument("--once", action="store_true")
parser.add_argument("--save", type=int, default=0)
parser.add_argument("--memory", type=int)
parser.add_argument("--nan", choices=("body", "between"), default="", help="where the loss is looked at")
parser.add_argument("--raises", choices=("before", "behind", "between"), default="", help="before or behind the update")
parser.add_argument("--on-anomaly", default="redo")
parser.add_argument("--leave-out", type=int, default=-1, help="the update of this step is made without gradients")
parser.add_argument("--stage", type=int, default=-1)
parser.add_argument("--waits", action="store_true", help="who has said so, the first time: for the end of its process")
parser.add_argument("--killed", choices=("early", "late"), help="rank 1's second process: before its Session, or in it")
asked = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
dropout = nn.Dropout(0.3 if asked.stage >= 0 else 0.0)
core = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), dropout, nn.Linear(8, 3))
model = DistributedDataParallel(core)
optimizer = torch.optim.AdamW(core.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())
link = read_link()
wrong = link is None or link.incarnation == 0 or not asked.once
looks = not (asked.nan or asked.raises)
first = dist.get_rank() == 0 and wrong
told = False
began: int | None = None


def may_die(when: str) -> None:
    if asked.killed == when and dist.get_rank() == 1 and link is not None and link.incarnation == 1:
        os.kill(os.getpid(), signal.SIGKILL)


may_die("early")


def wrong_is_saved() -> bool:
    names = [path.name for path in Path(link.run_dir, "checkpoints").glob("step_*[0-9]")] if link else []
    return asked.memory is not None or not asked.save or any(int(name[5:]) > asked.at for name in names)


def wait_for_storage(commits: int) -> None:
    """So that no checkpoint is left out because storage is busy with the one before."""
    with session.slow("waiting for storage"):
        while session._driver._link.peers.settled < commits:
            time.sleep(0.005)


def wait_for_the_end() -> None:
    """So that nothing overwrites in memory what all are to go back to, however long the agent and its holder take."""
    if asked.waits and link is not None and link.attempt == 0:
        time.sleep(30)


def looked_at(step: rt.Step, loss: torch.Tensor) -> None:
    nan = dist.get_rank() == 1 and step.number == asked.at and wrong
    session.check(loss * float("nan") if nan else loss)
    if nan:
        wait_for_the_end()


def may_raise(step: rt.Step, where: str) -> None:
    here = asked.raises == where and dist.get_rank() == 1 and step.number == asked.at
    if here and (step.attempt == 0 and wrong if asked.once else True):
        raise RuntimeError("TREError: the global norm is 46.1")


with rt.Session(model=model, optimizer=optimizer, on_anomaly=asked.on_anomaly) as session:
    if asked.save:
        session.save_every(steps=asked.save, memory_steps=asked.memory)
    may_die("late")
    for step in session.steps(asked.steps):
        with step:
            if step.number >= asked.stage >= 0:
                dropout.p = 0.0
            loss = (model(torch.randn(8, 6)) - torch.randn(8, 3)).pow(2).mean()
            may_raise(step, "before")
            loss.backward()
            if step.number == asked.at and wrong and looks:
                for parameter in core.parameters():
                    parameter.grad.mul_(asked.factor)
            if step.number == asked.leave_out:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            if asked.nan == "body":
                looked_at(step, loss)
            may_raise(step, "behind")
        if asked.nan == "between":
            looked_at(step, loss)
        if step.done:
            may_raise(step, "between")
        time.sleep(0.03)  # as a step of some size takes
        began = step.number if began is None else began
        newest = step.number - 1  # the update whose checkpoint is on its way
        if link is not None and asked.save and asked.memory is None and newest > began and newest % asked.save == 0:
            wait_for_storage(newest)
        if (
            asked.at >= 0
            and step.number - asked.at >= asked.look
            and step.done
            and first
            and not told
            and looks
            and wrong_is_saved()
        ):
            told = True
            session.anomaly(asked.at, "the validation has become worse")
            wait_for_the_end()
dist.destroy_process_group()
