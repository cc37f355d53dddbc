"""What a script hangs on a collective's end, and keeps: gradients of two batches are added up in memory of its own, as
they come, on the thread that tells of the end. In step ``SLOW`` the first of it takes longer than a recovery.
"""

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import resilient_train as rt

SLOW = 5
WIDTH = 16


class Mean:
    """Of the losses of this rank, written behind the update."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Trainer:
    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.sums = [torch.zeros_like(each) for each in self.net.parameters()]
        self.adding = threading.Lock()  # gloo tells on two threads, and add_ lets the other one in
        self.mean, self.seen = Mean(), 0
        self.adds, self.added = threading.Event(), threading.Event()
        """What the body that a fault cuts has begun."""

    def train(self, step: rt.Step) -> None:
        for each in self.sums:
            each.zero_()
        waits = []
        parameters = list(self.net.parameters())
        for batch in range(2):
            rows = torch.Generator().manual_seed(100 * step.number + 10 * batch + dist.get_rank())
            loss = self.net(torch.randn(4, WIDTH, generator=rows)).square().mean()
            if batch == 0:  # a fault of `at=backward` does not hit here
                slow = step.number == SLOW and step.attempt == 0 and dist.get_rank() == 1
                waits.append(self.add(torch.autograd.grad(loss, parameters), slow=slow))
                if slow:
                    self.adds.wait()
            else:
                loss.backward()
                waits.append(self.add([each.grad for each in parameters]))
        for each in waits:
            each.wait()
        if step.number == SLOW and step.attempt and dist.get_rank() == 1:
            self.added.wait()
        for parameter, total in zip(self.net.parameters(), self.sums, strict=True):
            parameter.grad = total.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.mean.value = 0.9 * self.mean.value + 0.1 * loss.item()
        torch.rand(())  # as an iterator over a loader of torch's does
        self.seen += 1

    def add(self, gradients: Sequence[torch.Tensor], *, slow: bool = False) -> torch.futures.Future[None]:
        flat = torch.cat([each.flatten() for each in gradients])

        def ended(_: object) -> None:
            if slow:
                self.adds.set()
                numbers = torch.arange(1_000_000.0).sin()
                for _ in range(20):
                    numbers.sort()
            at = 0
            with self.adding:
                for each in self.sums:
                    each.add_(flat[at : at + each.numel()].view_as(each) / dist.get_world_size())
                    at += each.numel()
            if slow:
                self.added.set()

        return dist.all_reduce(flat, async_op=True).get_future().then(ended)


dist.init_process_group("gloo")
torch.manual_seed(0)
trainer = Trainer()
with rt.Session(model=trainer.net, optimizer=trainer.optimizer, rank_state={"mean": trainer.mean}) as session:
    for step in session.steps(10):
        with step:
            trainer.train(step)
dist.destroy_process_group()
