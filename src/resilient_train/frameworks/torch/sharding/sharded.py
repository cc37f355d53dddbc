"""Models that are divided among ranks: by ``fully_shard`` (FSDP2, HSDP), by ``parallelize_module`` (TP), or by both.

Each of their parameters is a DTensor: it has a global shape, a mesh of ranks and a placement on each dimension of that,
and this rank's part of it is a tensor of its own, which is what is copied, compared and saved. The ranks that hold the
same part of *everything* are replicas; the meshes say which these are, so every rank knows them without a word to
another (decision 51).

While a module of FSDP's computes its parameters are whole tensors, and the DTensors are not in their places. What a
fault has cut there is put back by ``reset``, before anybody looks at the state.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import _composable_state

from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.frameworks.torch.tensors.leaves import is_sharded
from resilient_train.observe.sinks import say_aside

_SHARDS = ("Shard", "_StridedShard")
"""The second one: a dimension that both ``parallelize_module`` and ``fully_shard`` divide."""
Replicas = tuple[tuple[int, ...], ...]

_Placed = tuple[int, tuple[Any, ...]]
"""A mesh, by its id, and the placement on each of its dimensions."""


class _Part(NamedTuple):
    """What a rank holds of a tensor: its place along the dimensions of the mesh that divide it, and the others."""

    slice: int
    divided: tuple[int, ...]
    copied: tuple[int, ...]


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was called on it."""
    return is_a(module, "FSDPModule")


def is_a(thing: object, name: str) -> bool:
    """Whether it is an instance of that class of ``torch.distributed``. By name: importing these takes a second."""
    return any(
        base.__name__ == name and base.__module__.startswith("torch.distributed") for base in type(thing).__mro__
    )


class Sharding:
    """Of the registered models. Those without ``fully_shard`` have none, and nothing is done for them."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._modules: list[Any] = [module for model in models for module in model.modules() if is_fsdp(module)]
        self._groups = [group for module in self._modules for group in _groups_of(module)]
        self._copies: dict[tuple[_Placed, tuple[int, ...]], int] = {}
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._whole: list[Any] = []
        """Groups whose tensors were whole when an optimizer had just written; and ..."""
        self._stale: list[Any] = []
        """... those into whose parts one has."""
        self._told = False

    def find_others(self) -> None:
        """FSDP's modules that are in no registered model (a frozen teacher): they are put back as the others are.

        Left alone, one stays whole behind a forward pass without gradients. A rank that is replaced gathers it once
        more: alone, and so it would take what the others gather next for a part of that.

        torch lists them. A look at all objects would take a forked rank 0.2 s, at its start and in each recovery.
        """
        known = set(self._modules)
        listed = list(_composable_state._module_state_mapping)
        self._others.update(each for each in listed if is_fsdp(each) and each not in known)

    def __bool__(self) -> bool:
        return bool(self._modules)

    def replicas(self) -> Replicas:
        """The groups of ranks that hold the same parts; () if nothing is divided. Raises ConfigError for what is
        divided in a way that is not known here.

        Plain parameters (beside those of ``parallelize_module``) say nothing: that replicas have the same is compared.
        """
        managed = {id(parameter.sharded_param) for group in self._groups for parameter in group.fsdp_params}
        seen = dict[_Placed, dict[int, _Part]]()
        for name, parameter in (each for model in self._models for each in model.named_parameters()):
            if managed and id(parameter) not in managed:
                raise ConfigError(
                    f"model: parameter {name!r} is not sharded, and others of the registered models are: call "
                    "fully_shard on the whole model, without ignored_params, and register nothing beside it"
                )
            if is_sharded(parameter) and (placed := _placed(parameter)) not in seen:
                seen[placed] = _held(name, parameter)
        if not seen:
            return ()
        alike: dict[Any, list[int]] = {}
        for rank in range(dist.get_world_size()):
            alike.setdefault(tuple(held[rank][:2] for held in seen.values()), []).append(rank)
        return tuple(sorted(map(tuple, alike.values())))

    def copy_of(self, tensor: torch.Tensor, group: tuple[int, ...]) -> int:
        """Which copy of this DTensor the ranks of a replica group hold a part of. The parts of one copy are a whole.

        There are several where ranks hold the same part without being replicas, and in the slices of a mesh.
        """
        placed = _placed(tensor)
        if (placed, group) not in self._copies:
            copies = {rank: (part.slice, part.copied) for rank, part in _held("", tensor).items()}
            self._copies[placed, group] = sorted({*copies.values()}).index(min(copies[rank] for rank in group))
        return self._copies[placed, group]

    @cached_property
    def division(self) -> str:
        """How the parameters are divided among ranks, as a digest; empty: not at all. It is the same on all ranks that
        have the same parameters: on those of one stage of a pipeline, and on all of them where there are no stages.
        """
        named = (each for model in self._models for each in self.divided(dict(model.named_parameters())).items())
        told = [f"{name} {along}" for name, each in named if is_sharded(each) and (along := _along(each))]
        return xxhash.xxh3_64_hexdigest("\n".join(told).encode()) if told else ""

    def divided(self, named: dict[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
        """The parameters as they are held between two passes, whatever is in their places now."""
        held = {
            id(whole): parameter.sharded_param
            for group in self._groups
            for parameter in group.fsdp_params
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None
        }
        return {name: held.get(id(parameter), parameter) for name, parameter in named.items()}

    def move(self, tensor: torch.Tensor) -> bool:
        """Gives this rank's part new memory, out of which it is gathered as well. False: it is no parameter of
        ``fully_shard``'s.
        """
        sharded: Any = tensor
        for parameter in (each for group in self._groups for each in group.fsdp_params):
            if parameter.sharded_param is sharded:
                old, part = parameter._sharded_param_data, sharded._local_tensor
                skipped = part.storage_offset() - old.storage_offset()
                old.data = torch.zeros_like(old.data)  # all parts are of one size: some have a rest behind them
                part.data = old.as_strided(part.shape, part.stride(), old.storage_offset() + skipped)
                return True
        return False

    def reshard(self) -> None:
        """Between two bodies: after a forward pass alone (an evaluation) the outermost parameters are still whole."""
        if self._stale:
            self._tell_stale()
        for module in self._modules if not all(group.is_sharded for group in self._groups) else ():
            module.reshard()
        for module in self._others if len(self._others) else ():  # to walk through none takes 4 us
            if not all(group.is_sharded for group in _groups_of(module)):
                module.reshard()

    def optimizer_wrote(self) -> None:
        """One has, just now."""
        self._whole += [group for group in self._groups if not group.is_sharded]

    def updated(self, written: Callable[[], Collection[int]]) -> None:
        """The update is over, and the optimizers have written the parameters of these ids."""
        whole, self._whole = self._whole, []
        ids = written() if whole else ()
        self._stale = [each for each in whole if any(id(one.sharded_param) in ids for one in each.fsdp_params)]

    def _tell_stale(self) -> None:
        stale, self._stale = [group for group in self._stale if not group.is_sharded], []
        if stale and not self._told:
            self._told = True
            if config.is_first_rank():
                say_aside(
                    "parameters of fully_shard were whole when the optimizer wrote (a forward pass between backward() "
                    "and optimizer.step(), or set_reshard_after_backward(False), leaves them so): torch alone computes "
                    "the next step with what they were before the update. Here they are gathered anew, so these are "
                    "not torch's bits. With model.reshard() in front of optimizer.step() both are the same "
                    "(docs/how-to/sharded.md)"
                )

    def reset(self) -> None:
        """Behind a body that a fault has cut: as if its passes had not begun."""
        self._whole.clear()
        others = list(self._others)
        for module in (*self._modules, *others):
            state = module._get_fsdp_state()
            if state._is_root:
                _forget_works(state)
                module.reset_iter_state()
            elif state._is_root is None:  # its first pass was cut before it knew that it is the outermost one's
                state._training_state = type(state._training_state).IDLE
        for group in (*self._groups, *(group for module in others for group in _groups_of(module))):
            # Also of a module that was never the outermost one (``unshard(async_op=True)`` in front of its first pass,
            # or where its forward never runs): the next call would take it for under way, and wait for what was cut.
            group._all_gather_result = None
            for parameter in group.fsdp_params:
                _forget_gradient(parameter)
                # Each of them, whatever their group says: a signal may come between the first one's change and the
                # group's word about all of them, and reset_iter_state goes by that word.
                parameter.to_sharded()
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


def withholds(models: Iterable[torch.nn.Module]) -> bool:
    """Whether FSDP has gradients that it has not communicated (``set_requires_gradient_sync(False)``)."""
    groups = [group for model in models for each in model.modules() if is_fsdp(each) for group in _groups_of(each)]
    return any(
        group._partial_reduce_output is not None
        or parameter.unsharded_accumulated_grad is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in groups
        for parameter in group.fsdp_params
    )


def _forget_works(state: Any) -> None:
    """An all-gather that was under way (``set_unshard_async_op``) is cut: to wait for it would raise. So it is with a
    reduction (``finalize_backward(async_op=True)``, torch 2.15) of another model that shares this one's streams.
    """
    state._comm_ctx.active_gradient_reduction = None
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            result = group._all_gather_result
            if result is not None and isinstance(result.all_gather_work, dist.Work):
                group._all_gather_result = result._replace(all_gather_work=None)


def _forget_gradient(parameter: Any) -> None:
    """Of the whole tensor, which a backward pass that was cut has computed and not handed on. ``reset_iter_state``
    leaves it there, and the next pass would add to it: other gradients, and no error.
    """
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is not None:
        whole.grad = None
    if parameter.unsharded_accumulated_grad is not None:  # from torch 2.15 on it is another name of ``whole.grad``
        parameter.unsharded_accumulated_grad = None


def _placed(parameter: Any) -> _Placed:
    return id(parameter.device_mesh), parameter.placements


def _along(parameter: Any) -> str:
    """The dimensions of the mesh that divide it: how, among how many, and how far these are from one another."""
    ranks = _slices_of(parameter.device_mesh)[0]
    told = [
        f"{placement} {size} {int(ranks.select(at, 1).flatten()[0] - ranks.flatten()[0])}"
        for at, (placement, size) in enumerate(zip(parameter.placements, ranks.shape, strict=True))
        if size > 1 and not placement.is_replicate()
    ]
    return ", ".join(told)


def _slices_of(mesh: Any) -> torch.Tensor:
    """Ranks, in the shape of the mesh behind a first dimension of slices; ``mesh.mesh`` is this rank's slice."""
    slices: torch.Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
    return slices


def _held(name: str, parameter: Any) -> dict[int, _Part]:
    """Which part of it each rank of the job holds.

    A mesh may be one of several slices of another one (``mesh["tp"]``), and each rank has its own; whether those of
    two slices are the same tensor (replicas) or not (stages of a pipeline) is not known, so they count as different.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    slices = _slices_of(mesh)
    if sorted(slices.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ConfigError(
            f"model: {name!r} is divided over a mesh that is not made for all ranks, which can't be recovered: make "
            "one mesh of all ranks (init_device_mesh), and take its dimensions"
        )
    dividing = [dim for dim, each in enumerate(placements, start=1) if not each.is_replicate()]
    if any(bool((slices.diff(dim=dim) < 0).any()) for dim in dividing):
        raise ConfigError(
            f"model: {name!r} is divided over a mesh whose ranks do not ascend ({mesh.mesh.tolist()}): torch's groups "
            "have them in ascending order, so that what ranks gather and reduce are not the parts that the mesh says "
            "they hold; make it by init_device_mesh"
        )
    if any(not (each.is_replicate() or type(each).__name__ in _SHARDS) for each in placements):
        raise ConfigError(
            f"model: {name!r} is placed as {placements}, which can't be recovered: only Shard and Replicate can"
        )
    if len(parameter.__create_chunk_list__()) > 1:
        raise ConfigError(f"model: {name!r} lies in several blocks on this rank, which can't be recovered")
    held = dict[int, _Part]()
    for place in itertools.product(*map(range, slices.shape)):
        along: tuple[list[int], list[int]] = [], []
        for at, placement in zip(place[1:], placements, strict=True):
            along[placement.is_replicate()].append(at)
        held[int(slices[place])] = _Part(place[0], *map(tuple, along))
    return held
