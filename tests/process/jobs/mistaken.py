"""Loops with a mistake in them that ``mode`` names; without a guard each would end well, with something wrong.

``wrong-optimizer``: another one than the registered steps. ``by-hand``: no optimizer at all. ``never``: nothing steps.
``forgotten``: a parameter that no optimizer has. ``no-ddp``: nobody averages the gradients. ``drift``: in step ``--at``
rank 1 changes a parameter by itself, after the update. ``early``: a loss is given to the check in front of the body.
``ahead``: the next step's batch is drawn into a local variable. ``iterator``: of a loader that the Session does not
know. ``unsteady``: random numbers that no seed decides. ``own-mean``: a mean of this rank's own losses, where only what
is alike belongs. ``carries``: a message that is sent in one step and received in the next. ``epochs``: the loop is left
and entered again each four steps, and what it is in counts; ``phases``: likewise, over one iterator.
``other-module``: in step ``--at`` another activation is put in the first one's place, and a gradient gets a hook.
``hook-once``: from step ``--at`` on a layer has one. ``group``: each fourth step makes a process group.
``forks``: a child of the loop's ends by an exception.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import resilient_train as rt
from resilient_train.config import read_link


class Mean:
    """Of losses."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    def state_dict(self) -> dict[str, float]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)


parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("steps", type=int)
parser.add_argument("--at", type=int, default=-1)
parser.add_argument("--once", type=Path, help="goes wrong only if this file is not there, and makes it")
parser.add_argument("--pace", action="store_true", help="a step takes a while")
parser.add_argument("--save", type=int, default=0)
parser.add_argument("--memory", type=int, help="snapshots in memory between two saves")
parser.add_argument("--all-die-at", type=int, default=-1)
parser.add_argument("--leave-at", type=int, default=-1, help="where rank 0 is asked to end")
asked = parser.parse_args()
mode = asked.mode

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
core = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
model = core if mode == "no-ddp" else DistributedDataParallel(core)
optimizer = torch.optim.AdamW([*core.parameters()][mode == "forgotten" :], lr=1e-2)
registered = torch.optim.SGD(core.parameters(), lr=1e-2) if mode == "wrong-optimizer" else optimizer
torch.manual_seed(1 + rank)
pids = [0] * dist.get_world_size()
dist.all_gather_object(pids, os.getpid())
link = read_link()
first = link is not None and link.incarnation == 0
own, common = Mean(), Mean()
sent: list[object] = []
inputs, over = torch.randn(8, 6), iter(DataLoader(torch.randn(256, 6), batch_size=8))
state = {"common": common, "own": own} if mode == "own-mean" else {}
epoch, handle = 0, None


def steps(session: rt.Session) -> Iterator[rt.Step]:
    global epoch
    if mode not in ("epochs", "phases"):
        yield from session.steps(asked.steps)
        return
    every = session.steps(asked.steps) if mode == "phases" else None
    for epoch in range(asked.steps // 4):  # noqa: B007 - the body goes by it
        for step in every or session.steps(asked.steps):
            yield step
            if step.done and step.number % 4 == 3 and step.number < asked.steps - 1:
                break


with rt.Session(model=model, optimizer=registered, state=state) as session:
    if asked.save:
        session.save_every(steps=asked.save, memory_steps=asked.memory)
    for step in steps(session):
        if mode == "early":
            session.check(1.0)
        with step:
            if mode == "group" and step.number % 4 == 0:
                dist.destroy_process_group(dist.new_group([0, 1]))
            if mode == "forks" and step.number == 3:
                child = os.fork()
                if child == 0:
                    sys.excepthook = lambda *_: os._exit(9)  # torch's threads are not there to be ended
                    raise RuntimeError("the child's own")
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
            if mode == "hook-once" and step.number >= asked.at and handle is None:
                handle = core[0].register_forward_hook(lambda _module, _given, output: output * 1.5)
            if mode != "ahead":
                inputs = next(over) if mode == "iterator" else torch.randn(8, 6)
            loss = (model(inputs) - torch.randn(8, 3)).pow(2).mean()
            if mode == "ahead":
                inputs = torch.randn(8, 6)
            if mode == "unsteady":
                loss = loss * (1 + int.from_bytes(os.urandom(4)) / 2**24)
            (loss * (1 + epoch)).backward()
            if mode == "carries" and rank == 0:
                sent = [*sent[-2:], (inputs, dist.isend(inputs, 1))]  # gloo: it is over when it is received
            if mode == "carries" and rank == 1 and step.number > 0:
                dist.recv(inputs, 0)
            if mode == "by-hand":
                for parameter in core.parameters():
                    parameter.data.add_(parameter.grad, alpha=-0.01)
            elif mode != "never":
                optimizer.step()
            if mode != "never-zeroed":
                optimizer.zero_grad()
            own.add(loss.item())
            common.add(1.0)
            if rank == 0 and step.number == asked.leave_at and step.attempt == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if first and rank == 0 and step.number == asked.all_die_at:
                for pid in sorted(pids, key=os.getpid().__eq__):
                    os.kill(pid, signal.SIGKILL)
            if mode == "other-module" and step.number == asked.at:
                core[1] = nn.ReLU()
                core[0].bias.register_hook(lambda gradient: gradient * 0.5)
            if asked.pace:
                time.sleep(0.05)
            if mode == "drift" and rank == 1 and step.number == asked.at and not (asked.once and asked.once.exists()):
                while (
                    asked.once
                    and asked.save < asked.steps
                    and not [*Path(link.run_dir, "checkpoints").glob("step_*[0-9]")]
                ):
                    time.sleep(0.01)  # one is on its way
                core[2].bias.data[1] += 1e-3
                if asked.once:
                    asked.once.touch()
dist.destroy_process_group()
