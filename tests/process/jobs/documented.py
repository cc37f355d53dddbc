"""Runs a block of Python from the documentation as a reader would: inside a script that has what it speaks of.

``FILE``: the block. A line that is only ``...`` stands for the rest of a training step. A block without a Session of
its own is the body of a step, or a loop, of one that is made here.
"""

import contextlib
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

import resilient_train as rt

STEPS = 8


class Ema(nn.Module):
    """What the pages call ``ema``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model()

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.inner.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class WithLoss(nn.Module):
    """``model(X, Y)`` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.inner(inputs), targets)


class Recurrent(nn.Module):
    """``model(inputs, state)`` is the output, and the next state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, state = self.inner(inputs.unsqueeze(0), state)
        return self.head(output[0]), state


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))


def at_hand(names: dict[str, Any]) -> None:
    """Fills ``names`` with what a training script has when it comes to its Session."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank)
    loader = DataLoader(data, batch_size=4, sampler=sampler)

    def loss_of(what: Any) -> torch.Tensor:
        inputs, targets = next(iter(loader)) if isinstance(what, nn.Module) else what
        return cross_entropy(names["model"](inputs), targets)

    names |= {
        "data": data,
        "loader": loader,
        "my_sampler": torch.Generator(),
        "loss_of": loss_of,
        "build_model": build_model,
    }
    names |= {"ema_model": build_model(), "ema": Ema(), "history": [], "total": STEPS, "everything": {}}
    names |= {"batch": 4, "width": 8}
    names["evaluate"] = lambda *_: None
    names |= {"validate": lambda _: 1.0, "usual": 1.0}
    names["get_batch"] = lambda _: (torch.randn(4, 4), torch.randint(3, (4,)))


def grouped(names: dict[str, Any]) -> dict[str, Any]:
    """The same for what needs a process group; returns what the Session is to be told of."""
    build = WithLoss if "model(X, Y)" in text else Recurrent if "hidden = model(" in text else build_model
    model = names["model"] = DistributedDataParallel(build())
    optimizer = names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    told = {"model": model, "optimizer": optimizer, "loader": names["loader"], "scheduler": names["scheduler"]}
    told["state"] = {"ema": names["ema"]}
    if "scaler" in text:
        told["scaler"] = names["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    if "first.step" in text:
        half = list(model.parameters())
        names["first"], names["second"] = (torch.optim.SGD(each, lr=0.1) for each in (half[:2], half[2:]))
        told |= {"optimizer": [names["first"], names["second"]], "scheduler": None}
    if "of_critic" in text:
        critic = DistributedDataParallel(nn.Linear(4, 1))
        names["of_critic"] = torch.optim.SGD(critic.parameters(), lr=0.1)
        names["of_generator"] = optimizer
        names["critic_loss"] = lambda: critic(torch.randn(2, 4)).sum()
        names["generator_loss"] = lambda: model(torch.randn(2, 4)).sum()
        told |= {"model": [model, critic], "optimizer": [names["of_critic"], optimizer], "undo": True}
    return told


def training_step(text: str) -> str:
    """Puts into the place of a line of dots what it stands for."""
    body = [] if "loss.backward()" in text else ["loss = loss_of(step.batch)", "loss.backward()"]
    if "optimizer.step()" not in text:
        body += ["optimizer.step()", "optimizer.zero_grad()"]
    return re.sub(r"^( *)\.\.\.$", lambda dots: "\n".join(dots[1] + line for line in body), text, flags=re.MULTILINE)


def run_body(code: Any, names: dict[str, Any], told: dict[str, Any]) -> None:
    """The block is (a part of) the body of a step."""
    with rt.Session(**told) as session:
        names["session"] = session
        for step in session.steps(STEPS):
            names["step"] = step
            if "with step" in text:
                exec(code, names)
                continue
            with step:
                names["loss"] = names["loss_of"](step.batch)
                if "backward" not in text:
                    names["loss"].backward()
                exec(code, names)
                if ".step(" not in text:
                    names["optimizer"].step()
                names["model"].zero_grad()


def limited(steps: Any) -> Any:
    """``Session.steps`` of a training that is short, whatever the page says."""

    @functools.wraps(steps)
    def few(self: rt.Session, total: int, **options: Any) -> Any:
        return steps(self, min(total, STEPS), **options)

    return few


text = training_step(Path(sys.argv[1]).read_text())
text = re.sub(r"% \d{2,} == \d{2,}", "% 2 == 1", text)  # something that is done now and then
rt.Session.steps = limited(rt.Session.steps)
os.chdir(Path(sys.argv[1]).parent)
names: dict[str, Any] = {
    "rt": rt,
    "torch": torch,
    "dist": dist,
    "nn": nn,
    "os": os,
    "contextlib": contextlib,
    "cross_entropy": cross_entropy,
    "DataLoader": DataLoader,
    "Sampler": Sampler,
    "TensorDataset": TensorDataset,
    "DistributedSampler": DistributedSampler,
    "DistributedDataParallel": DistributedDataParallel,
}
at_hand(names)
code = compile(text, sys.argv[1], "exec")
if "init_process_group" in text:
    exec(code, names)
else:
    dist.init_process_group("gloo")
    told = grouped(names)
    if "Session(" in text or "rt.resilient" in text:
        exec(code, names)
    elif text.startswith("for step in"):
        with rt.Session(**told) as names["session"]:
            exec(code, names)
    else:
        run_body(code, names, told)
dist.destroy_process_group()
