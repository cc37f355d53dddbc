"""What a loop switches at DDP and at ``fully_shard``'s modules: put back at a redo, and told to another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.kept.kept_state import KeptState, Modes  # noqa: E402

pytestmark = pytest.mark.torch

SWITCHES: dict[str, Callable[[Any], None]] = {
    "gradient_sync": lambda model: model.set_requires_gradient_sync(False),
    "one module's": lambda model: model[0].set_requires_gradient_sync(False, recurse=False),
    "all_reduce": lambda model: model.set_requires_all_reduce(False),
    "last_backward": lambda model: model.set_is_last_backward(False),
    "after_forward": lambda model: model.set_reshard_after_forward(False),
    "after_forward, all": lambda model: model.set_reshard_after_forward(True),
    "after_backward": lambda model: model.set_reshard_after_backward(False),
    "forward_prefetch": lambda model: model[0].set_modules_to_forward_prefetch([model[1]]),
    "backward_prefetch": lambda model: model[1].set_modules_to_backward_prefetch([model[0]]),
    "divide_factor": lambda model: model.set_gradient_divide_factor(3.5),
    "force_sum": lambda model: model.set_force_sum_reduction_for_comms(True),
    "unused_params": lambda model: model.set_reduce_scatter_unused_params(True),
    "in_backward": lambda model: model.set_unshard_in_backward(False),
    "async_op": lambda model: model._set_unshard_async_op(True),
}
if hasattr(FSDPModule, "set_manual_backward_finalization"):  # torch 2.15, or later
    SWITCHES["manual"] = lambda model: model.set_manual_backward_finalization(True)


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    """As if this were the first of four; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def net() -> Any:
    """The last part belongs to the whole."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in model[:2]:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def switched(model: Any) -> list[Any]:
    """All that torch keeps of switches, comparable with another model's."""
    states = [module._get_fsdp_state() for module in (model, *model[:2])]
    context = states[0]._state_ctx
    found: list[Any] = [context.is_last_backward, getattr(context, "manual_backward_finalization", False)]
    for state in states:
        found.append([*map(states.index, state._states_to_forward_prefetch)])
        found.append([*map(states.index, state._states_to_backward_prefetch)])
        found.append(state._auto_reshard_after_forward)
        (group,) = state._fsdp_param_groups
        plain = {name: value for name, value in vars(group).items() if isinstance(value, (bool, float, int))}
        found.append({name: value for name, value in sorted(plain.items()) if not name.startswith("_")})
        found.append(group.post_forward_mesh_info is None)
    return found


def forward(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(3, 6))
    model.reshard()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_a_redo_finds_them_as_they_were(switch: Callable[[Any], None], begun: bool) -> None:
    model = net()
    if begun:
        forward(model)
    kept = KeptState(Objects((model,), ()))
    kept.begin({})
    before = switched(model)
    switch(model)
    assert switched(model) != before
    kept.cut()
    kept.put_back()
    assert switched(model) == before


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_another_process_gets_them(switch: Callable[[Any], None], begun: bool) -> None:
    """Which has not begun its first forward pass."""
    model, other = net(), net()
    if begun:
        forward(model)
    switch(model)
    kept = KeptState(Objects((model,), ()))
    kept.begin({})
    told = msgspec.msgpack.encode(kept.modes(within=False))
    KeptState(Objects((other,), ())).take_modes(msgspec.msgpack.decode(told, type=Modes))
    forward(other)
    if not begun:
        forward(model)
    assert switched(other) == switched(model)
    (group,) = other[0]._get_fsdp_state()._fsdp_param_groups
    assert group.post_forward_mesh_info in (None, group.mesh_info), "of its own meshes"


def test_the_first_forward_pass_of_a_window_that_is_cut_is_not_taken_back() -> None:
    """It has the outermost parameters stay whole; there is no other one that would."""
    model, other = net(), net()
    kept = KeptState(Objects((model,), ()))
    kept.begin({})
    forward(model)
    kept.cut()
    kept.put_back()
    forward(other)
    assert switched(model) == switched(other)


def test_who_does_not_average_goes_on_so() -> None:
    one, other = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
    kept = KeptState(Objects((one,), ()))
    one.require_backward_grad_sync = False
    kept.begin({})
    one.require_backward_grad_sync = True
    kept.put_back()
    assert not one.require_backward_grad_sync
    KeptState(Objects((other,), ())).take_modes(kept.modes(within=True))
    assert not other.require_backward_grad_sync
