"""What a training keeps by ways that its text does not show: a row by another name, attributes by a name that is made,
callbacks behind an object that hands calls on, what hangs on parameters. And what is written anew in each step.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import resilient_train as rt

WIDTH = 4


class Meter:
    def __init__(self) -> None:
        self.average, self.last = 0.0, 0.0

    def on_step(self, loss: float) -> None:
        self.last = loss
        self.average = 0.9 * self.average + 0.1 * self.last


class Callbacks:
    def __init__(self, *each: Meter) -> None:
        self.each = each

    def __getattr__(self, name: str) -> Callable[..., None]:
        def for_all(*arguments: Any) -> None:
            for one in self.each:
                getattr(one, name)(*arguments)

        return for_all


class Trainer:
    def __init__(self) -> None:
        self.net = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-2)
        self.callbacks = Callbacks(Meter(), Meter())
        self.histories = [deque[float](maxlen=3), deque[float](maxlen=3)]
        self.ring = torch.zeros(32, WIDTH)
        self.sums = [torch.zeros_like(each) for each in self.net.parameters()]
        self.logged = list[float]()
        self.loss = torch.zeros(())

    def train(self, step: rt.Step) -> None:
        rows = torch.Generator().manual_seed(step.number)
        inputs = torch.randn(2, WIDTH, generator=rows)
        self.loss = self.net(inputs).square().mean()
        self.loss.backward()
        for each, parameter in zip(self.sums, self.net.parameters(), strict=True):
            each.zero_()
            each.add_(parameter.grad)
            dist.all_reduce(each)
            parameter.residual = getattr(parameter, "residual", 0) + each
        row = self.ring[step.number]
        row.copy_(inputs[0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        for each in self.histories:
            each.append(self.loss.item())
        setattr(self, f"average_of_{self.loss.ndim}", self.loss.item())
        self.callbacks.on_step(self.loss.item())
        self.logged.append(self.loss.item())


dist.init_process_group("gloo")
torch.manual_seed(0)
trainer = Trainer()
with rt.Session(model=trainer.net, optimizer=trainer.optimizer) as session:
    for step in session.steps(12):
        with step:
            trainer.train(step)
dist.destroy_process_group()
