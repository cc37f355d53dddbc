"""An optimizer's ``state`` under keys that mean the same in another process.

A parameter's number, counted through the groups; the ``ParameterPlace`` of a parameter that is in no group any more (it
may come back, and then its moments count again); a word, where the optimizer keeps something for all parameters
together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from resilient_train.errors import StateError
from resilient_train.frameworks.torch.kept.optimizer_groups import Groups, ParameterPlace, parameters_of
from resilient_train.frameworks.torch.sharding.zero import ZeroOptimizer

Key = int | tuple[int, str] | str


def entries_of(optimizer: torch.optim.Optimizer, where: Mapping[int, ParameterPlace], groups: Groups) -> dict[Key, Any]:
    """The entries, not copied; ``where`` as from ``optimizer_groups.places``. ``groups``: the numbers are of these.

    Raises StateError for a key of another kind.
    """
    state: Mapping[Any, Any] = optimizer.state
    parameters = [each for group in groups for each in group]
    entries: dict[Key, Any] = {i: dict(state[p]) for i, p in enumerate(parameters) if p in state}
    if len(entries) == len(state):
        return entries
    numbered = set(map(id, parameters))
    for key, entry in state.items():
        if id(key) in where:
            if id(key) not in numbered:
                entries[where[id(key)]] = dict(entry)
        elif isinstance(key, str):
            entries[key] = entry
        else:
            raise StateError(
                f"{type(optimizer).__qualname__} keeps state under a {type(key).__qualname__} that is no parameter of "
                "a registered model: it can't be carried to another process"
            )
    return entries


def order_of(
    optimizer: torch.optim.Optimizer, entries: Mapping[Key, Any], where: Mapping[int, ParameterPlace], groups: Groups
) -> list[Key]:
    """The keys of the optimizer's entries in its own order: in which parameters had their first gradient. Whoever goes
    through them gets other sums in another one, and another file. Empty: it is the one of ``entries``, as ever but
    where parameters were left out at first; or each rank has a part of its own.
    """
    if isinstance(optimizer, ZeroOptimizer):
        return []
    numbers = {id(parameter): number for number, parameter in enumerate(itertools.chain.from_iterable(groups))}
    state: Mapping[Any, Any] = optimizer.state
    order: list[Key] = []
    for key in state:
        place = key if isinstance(key, str) else numbers.get(id(key), where.get(id(key)))
        if place is not None:
            order.append(place)
    return order if order != [*entries] else []


def put_entries(
    optimizer: torch.optim.Optimizer,
    entries: Mapping[Key, Any],
    models: Sequence[Mapping[str, torch.nn.Parameter]],
    order: Sequence[Key] = (),
) -> None:
    """The inverse: they become the whole state of an optimizer that has the same groups. One that updates a part of the
    parameters takes those of its part.
    """
    numbered = parameters_of(optimizer)
    optimizer.state.clear()
    for key in dict.fromkeys((*order, *entries)):
        if key not in entries:
            continue
        entry = entries[key]
        if isinstance(key, str):
            optimizer.state[key] = entry  # type: ignore[index] # torch's stub knows of parameters only
            continue
        parameter = _parameter(key, numbered, models)
        if not isinstance(optimizer, ZeroOptimizer) or optimizer.updates(parameter):
            optimizer.state[parameter] = dict(entry)


def _parameter(
    key: int | tuple[int, str],
    numbered: Sequence[torch.nn.Parameter],
    models: Sequence[Mapping[str, torch.nn.Parameter]],
) -> torch.nn.Parameter:
    if isinstance(key, int):
        return numbered[key]
    model, name = key
    return models[model][name]
