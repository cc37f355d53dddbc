"""Which parameters the groups of an optimizer hold. It is state too: ``add_param_group`` changes it in training.

Between processes a parameter is known by its place in the registered models: (number of the model, name in it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from resilient_train.errors import LayoutError, StateError
from resilient_train.frameworks.torch.kept.module_entries import same_objects
from resilient_train.frameworks.torch.sharding.zero import ZeroOptimizer

Groups = list[list[torch.nn.Parameter]]


class ParameterPlace(NamedTuple):
    """Where a parameter is in the registered models."""

    model: int
    name: str


def groups_of(optimizer: torch.optim.Optimizer, before: Groups | None = None) -> Groups:
    """The parameters by group, to be kept. ``before``: these, if they are still so."""
    groups = [group["params"] for group in optimizer.param_groups]
    if before is not None and len(before) == len(groups) and all(map(same_objects, groups, before)):
        return before
    return [*map(list, groups)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters in the order in which their state is numbered."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def regroup(optimizer: torch.optim.Optimizer | ZeroOptimizer, wanted: Groups) -> None:
    """Gives the optimizer these groups. Those that it lacks get the default settings, those above their number go."""
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.regroup(wanted)
        return
    groups = optimizer.param_groups
    del groups[len(wanted) :]
    for group, parameters in zip(groups, wanted, strict=False):
        held = group["params"]
        if not same_objects(held, parameters):
            held[:] = parameters
    for parameters in wanted[len(groups) :]:
        optimizer.add_param_group({"params": list(parameters)})


def places(models: Sequence[Mapping[str, torch.nn.Parameter]]) -> dict[int, ParameterPlace]:
    """Place by the parameter's ``id``."""
    return {id(p): ParameterPlace(index, name) for index, named in enumerate(models) for name, p in named.items()}


def described(groups_of_all: Iterable[Groups], where: Mapping[int, ParameterPlace]) -> bytes:
    """All groups of all optimizers, for another process. Raises StateError for a parameter that is in no model."""
    try:
        return msgspec.msgpack.encode([[[where[id(p)] for p in group] for group in groups] for groups in groups_of_all])
    except KeyError:
        raise StateError(
            "an optimizer updates a parameter that is in no registered model: its value can't be carried to another "
            "process; register the module that holds it too, Session(model=[...])"
        ) from None


def found(description: bytes, models: Sequence[Mapping[str, torch.nn.Parameter]]) -> list[Groups]:
    """The inverse of ``described``, in the models of this process. Raises LayoutError."""
    try:
        told = msgspec.msgpack.decode(description, type=list[list[list[ParameterPlace]]])
    except msgspec.MsgspecError as error:
        raise LayoutError(f"the groups of the saved optimizers can't be read: {error}") from None
    try:
        return [[[models[place.model][place.name] for place in group] for group in groups] for groups in told]
    except LookupError as error:
        raise LayoutError(
            f"an optimizer updates parameter {error} there, which this process's model does not have"
        ) from None
