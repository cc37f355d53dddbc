"""Whether a state that comes from elsewhere is that of the objects that this process has built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from resilient_train.errors import LayoutError
from resilient_train.frameworks.roles import Objects
from resilient_train.state.tree import Slot

_WHY = "a script has to build the same objects whenever it is started, and a model can't grow while it trains"


def check(told: Mapping[str, Any], objects: Objects) -> None:
    """Raises LayoutError. ``told`` is a tree of ``State`` with a Slot in the place of each tensor."""
    small = told["small"]
    counts = {
        "models": (len(told["model"]), len(objects.models)),
        "optimizers": (len(told["optimizer"]), len(objects.optimizers)),
        "schedulers": (len(small["scheduler"]), len(objects.schedulers)),
        "scalers": (int(small["scaler"] is not None), int(objects.scaler is not None)),
    }
    for what, (there, here) in counts.items():
        if there != here:
            raise LayoutError(f"it is that of {there} {what}, and {here} are registered here: {_WHY}")
    odd = sorted(set(told["extra"]) ^ set(objects.extra))
    if odd:
        raise LayoutError(f"only one of the two has {odd[0]!r} in `state`: {_WHY}")
    for index, model in enumerate(objects.models):
        _compare("parameter", told["model"][index], dict(model.named_parameters()))
        _compare("buffer", told["buffers"][index], dict(model.named_buffers()))


def layout_of(models: Sequence[torch.nn.Module]) -> dict[str, str]:
    """Names, shapes and dtypes of all that a model has; the number of the model stands in front of the name."""
    named = (
        (f"{index}.{name}", f"{tuple(tensor.shape)} of {tensor.dtype}")
        for index, model in enumerate(models)
        for each in (model.named_parameters(), model.named_buffers())
        for name, tensor in each
    )
    return dict(named)


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """How a model has grown, or shrunk, between the two; empty if it has not."""
    odd = min((name for name in before.keys() | now.keys() if before.get(name) != now.get(name)), default=None)
    if odd is None:
        return ""
    there, was = (layout.get(odd, "not there") for layout in (now, before))
    return f"the model has changed since Session(): {odd!r} is {there}, and was {was}"


def check_unchanged(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises LayoutError if there is a ``difference``."""
    odd = difference(before, now)
    if odd:
        raise LayoutError(f"{odd}; a new start of the script could not take its state up")


def _compare(kind: str, there: Mapping[str, Slot], here: Mapping[str, torch.Tensor]) -> None:
    odd = sorted(set(there) ^ set(here))
    if odd:
        lacking = "is missing here" if odd[0] in there else "is only here"
        raise LayoutError(f"{kind} {odd[0]!r} {lacking}: {_WHY}")
    for name, slot in there.items():
        mine = here[name]
        if (tuple(mine.shape), str(mine.dtype)) != (slot.shape, slot.dtype):
            raise LayoutError(
                f"{kind} {name!r} is {slot.shape} of {slot.dtype} there, and {tuple(mine.shape)} of {mine.dtype} here: "
                f"{_WHY}"
            )
