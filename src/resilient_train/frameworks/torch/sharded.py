"""Models that ``fully_shard`` has divided among ranks (FSDP2, HSDP).

Each of their parameters is a DTensor: it has a global shape, a mesh of ranks and a placement on each dimension of that,
and this rank's part of it is a tensor of its own, which is what is copied, compared and saved. The ranks that hold the
same part of everything are replicas; the mesh says which these are, so every rank knows them without a word to another.

While a module computes its parameters are whole tensors, and the DTensors are not in their places. What a fault has
cut there is put back by ``reset``, before anybody looks at the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from resilient_train.errors import ConfigError

_FSDP = "FSDPModule"
Replicas = tuple[tuple[int, ...], ...]


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was called on it. By name: importing the class takes a second."""
    return any(
        base.__name__ == _FSDP and base.__module__.startswith("torch.distributed") for base in type(module).__mro__
    )


class Sharding:
    """Of the registered models. Those without ``fully_shard`` have none, and nothing is done for them."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._modules: list[Any] = [module for model in models for module in model.modules() if is_fsdp(module)]
        self._groups = [group for module in self._modules for group in _groups_of(module)]

    def __bool__(self) -> bool:
        return bool(self._modules)

    def replicas(self) -> Replicas:
        """The groups of ranks that hold the same parts; () if nothing is sharded. Raises ConfigError for what is
        sharded in a way that is not known here.
        """
        if not self:
            return ()
        managed = {id(parameter.sharded_param) for group in self._groups for parameter in group.fsdp_params}
        found = dict[Replicas, str]()
        for name, parameter in (each for model in self._models for each in model.named_parameters()):
            if id(parameter) not in managed:
                raise ConfigError(
                    f"model: parameter {name!r} is not sharded, and others of the registered models are: call "
                    "fully_shard on the whole model, without ignored_params, and register nothing beside it"
                )
            found.setdefault(_replicas_of(name, parameter), name)
        if len(found) > 1:
            one, other = itertools.islice(found.values(), 2)
            raise ConfigError(
                f"model: {one!r} and {other!r} are sharded over different meshes, which has not been tried"
            )
        (replicas,) = found
        return replicas

    def divided(self, named: dict[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
        """The parameters as they are held between two passes, whatever is in their places now."""
        held = {
            id(whole): parameter.sharded_param
            for group in self._groups
            for parameter in group.fsdp_params
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None
        }
        return {name: held.get(id(parameter), parameter) for name, parameter in named.items()}

    def reshard(self) -> None:
        """Between two bodies: after a forward pass alone (an evaluation) the outermost parameters are still whole."""
        for module in self._modules if not all(group.is_sharded for group in self._groups) else ():
            module.reshard()

    def reset(self) -> None:
        """Behind a body that a fault has cut: as if its passes had not begun."""
        for module in self._modules:
            state = module._get_fsdp_state()
            if state._is_root:  # None before the first forward pass, of which a fault can have cut nothing then
                _forget_works(state)
                module.reset_iter_state()
        for group in self._groups:
            for parameter in group.fsdp_params:
                _forget_gradient(parameter)
        self.reshard()


def placed_like(parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A tensor that is divided among ranks as the parameter is, and of which ``memory`` is this rank's part."""
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    made: torch.Tensor = DTensor.from_local(
        memory, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def _groups_of(module: Any) -> list[Any]:
    return list(module._get_fsdp_state()._fsdp_param_groups)


def _forget_works(state: Any) -> None:
    """An all-gather that was under way (``set_unshard_async_op``) is cut: to wait for it would raise."""
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            result = group._all_gather_result
            if result is not None and isinstance(result.all_gather_work, dist.Work):
                group._all_gather_result = result._replace(all_gather_work=None)


def _forget_gradient(parameter: Any) -> None:
    """Of the whole tensor, which a backward pass that was cut has computed and not handed on. ``reset_iter_state``
    leaves it there, and the next pass would add to it: other gradients, and no error.
    """
    parameter.unsharded_accumulated_grad = None
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is not None:
        whole.grad = None


def _replicas_of(name: str, parameter: Any) -> Replicas:
    mesh, placements = parameter.device_mesh, parameter.placements
    ranks = mesh.mesh
    if sorted(ranks.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ConfigError(
            f"model: {name!r} is sharded over a mesh that does not span all ranks, which can't be recovered"
        )
    if any(not (each.is_replicate() or type(each).__name__ == "Shard") for each in placements):
        raise ConfigError(
            f"model: {name!r} is placed as {placements}, which can't be recovered: only Shard and Replicate can"
        )
    if len(parameter.__create_chunk_list__()) > 1:
        raise ConfigError(f"model: {name!r} lies in several blocks on this rank, which can't be recovered")
    held: dict[tuple[int, ...], list[int]] = {}
    for place in itertools.product(*map(range, ranks.shape)):
        part = tuple(at for at, placement in zip(place, placements, strict=True) if not placement.is_replicate())
        held.setdefault(part, []).append(int(ranks[place]))
    return tuple(sorted(tuple(sorted(group)) for group in held.values()))
