"""What an optimizer keeps is written by its update; by a body, it is told."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from resilient_train.frameworks.torch.kept.optimizer_states import WrittenStates


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def halved(optimizer: torch.optim.Optimizer) -> None:
    for entry in optimizer.state.values():
        entry["momentum_buffer"].mul_(0.5)


def replaced(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def emptied(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


@pytest.mark.parametrize("how", [halved, replaced, emptied])
@pytest.mark.parametrize("window", [2, 16, 31])
def test_a_body_that_writes_it_is_told_once(how: Callable[[torch.optim.Optimizer], None], window: int) -> None:
    """From the 17th window on each 32nd is looked at."""
    model = nn.Linear(3, 2)
    others = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (others, model)]
    states = WrittenStates(optimizers)
    found = []
    for number in range(64):
        states.begin()
        if number >= window:
            how(optimizers[1])
        found.append(states.written())
        trained(others, optimizers[0])
        trained(model, optimizers[1])
    assert [number for number, name in enumerate(found) if name] == [31 if window > 15 else window]
    assert set(found) == {"", "optimizer.1"}
