"""What of a MindSpore network is its state: parameters, those of its optimizer among them, and buffers.

It is written by ``copy_`` alone. After the first step ``set_data`` and ``load_param_into_net`` give a parameter another
buffer, of which an optimizer that is compiled (PyNative mode) knows nothing: it would train on the old one, in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore
from mindspore import Tensor, nn

from resilient_train.errors import ConfigError, StateError

State = dict[str, Any]
"""Name -> Parameter or Tensor of MindSpore's."""


def state_of(network: nn.Cell) -> State:
    """The tensors themselves, not copies. Raises ConfigError for a network that can't be saved so."""
    found: State = {}
    named = [(each.name, each) for _, each in network.parameters_and_names()]
    for name, each in (*named, *network.named_buffers()):
        if name in found:
            raise ConfigError(f"two parameters of the network have the name {name!r}: give one of them another")
        if type(each).__name__ == "MapParameter" or getattr(each, "cache_enable", False):
            raise ConfigError(f"parameter {name!r}: hash tables and parameters in a cache can't be saved")
        found[name] = each
    return found


def put_back(state: State, values: Mapping[str, Any]) -> None:
    """Writes values (tensors, or arrays) in place, and looks whether they have arrived.

    Raises StateError where a tensor has another value afterwards.
    """
    for name, each in state.items():
        value = values[name]
        given = value if isinstance(value, Tensor) else Tensor(value)
        each.copy_(given)
        if each.get_bytes() != given.get_bytes():
            raise StateError(f"{name} was written, and has another value than it was given")


def difference(name: str, wanted: Any, found: Any) -> str:
    """In which way a tensor is not the wanted one, bit for bit; empty if it is."""
    for what in ("shape", "dtype"):
        if getattr(wanted, what) != getattr(found, what):
            return f"{name}: {what} {getattr(found, what)} in place of {getattr(wanted, what)}"
    return "" if wanted.get_bytes() == found.get_bytes() else f"{name}: other bits"


def own_optimizer(network: nn.Cell) -> nn.Optimizer | None:
    """The network's optimizer, which counts its updates in ``global_step``; None where there are none, or several."""
    found = [cell for _, cell in network.cells_and_names() if isinstance(cell, nn.Optimizer)]
    return found[0] if len(found) == 1 else None


def written_by_forward(network: nn.Cell, optimizer: nn.Optimizer) -> list[str]:
    """Names of what a step may write without its optimizer: the running means of a BatchNorm, for example."""
    own = {each.name for each in optimizer.get_parameters()} | {each.name for each in network.trainable_params()}
    return [name for name in state_of(network) if name not in own]


def wait_for_device() -> None:
    """Until all that was given to it is done. Raises what has failed there."""
    mindspore.runtime.synchronize()
