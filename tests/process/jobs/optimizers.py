"""A plain DDP loop with the optimizer that ``sys.argv[1]`` names, for ``sys.argv[2]`` steps.

``several`` is one of each that needs no closure: each has layers of its own.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

mode, steps = sys.argv[1], int(sys.argv[2])


class Averaging(torch.optim.SGD):
    """Averages the gradients once more, in its own step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        return super().step(closure)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization: steps by the gradient a little uphill. Only the optimizer in it is registered."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure):
        with torch.enable_grad():
            closure()
        moved = [(each, each.grad * 0.05) for group in self.param_groups for each in group["params"]]
        with torch.no_grad():
            for parameter, by in moved:
                parameter.add_(by)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter, by in moved:
                parameter.sub_(by)
        self.base.step()
        return loss


def make(parameters: list[nn.Parameter], mode: str) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
    if mode == "muon":
        flat = [each for each in parameters if each.dim() != 2]
        return [torch.optim.Muon([each for each in parameters if each.dim() == 2]), torch.optim.AdamW(flat, lr=1e-2)]
    kinds = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "frozen": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(parameters, lr=1e-2),
        "lbfgs": lambda: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, history_size=3),
        "closure": lambda: torch.optim.AdamW(parameters, lr=1e-2),
        "closure-without-undo": lambda: torch.optim.AdamW(parameters, lr=1e-2),
        "sharpness": lambda: Sharpness(parameters),
        "averaging": lambda: Averaging(parameters, lr=0.1),
    }
    return kinds[mode]()


dist.init_process_group("gloo")
torch.manual_seed(0)
modes = ("sgd", "momentum", "adafactor", "muon", "frozen") if mode == "several" else (mode,)
layers = nn.Sequential()
for number, each in enumerate(modes, 1):
    ends = 3 if number == len(modes) else 6
    block = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, ends))
    if each == "frozen":
        block[2].requires_grad_(requires_grad=False)
    layers.append(block)
model = DistributedDataParallel(layers)
optimizers = []
for block, each in zip(layers, modes, strict=True):
    made = make(list(block.parameters()), each)
    optimizers += made if isinstance(made, list) else [made]
torch.manual_seed(1 + dist.get_rank())
undo = mode in ("lbfgs", "closure", "averaging")
registered = [getattr(each, "base", each) for each in optimizers]
with rt.Session(model=model, optimizer=registered, undo=undo) as session:
    for step in session.steps(steps):
        with step:
            inputs, targets = torch.randn(8, 6), torch.randn(8, 3)

            def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = (model(inputs) - targets).pow(2).mean()
                loss.backward()
                shown = loss.detach().clone()
                dist.all_reduce(shown)  # LBFGS decides by it, so all ranks must have the same
                return shown

            if mode.startswith(("lbfgs", "closure", "sharpness")):
                optimizers[0].step(closure)
            else:
                closure()
                for optimizer in optimizers:
                    optimizer.step()
dist.destroy_process_group()
