"""The two forms in which ``ProcessGroup`` takes a call, made one: all arguments in their places, tensors in lists, the
root and the operation in options. torch's own functions use that form; a user who calls a group's methods may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from resilient_train.errors import UsageError

OPTIONS = {
    name: getattr(c10d, name)
    for name in [
        "AllreduceOptions",
        "AllreduceCoalescedOptions",
        "BroadcastOptions",
        "ReduceOptions",
        "AllgatherOptions",
        "GatherOptions",
        "ScatterOptions",
        "ReduceScatterOptions",
        "AllToAllOptions",
        "BarrierOptions",
    ]
}
"""By the names of their classes."""

_OTHERS = (
    {"allreduce": ("AllreduceOptions", 1), "allreduce_coalesced": ("AllreduceCoalescedOptions", 1)}
    | {"reduce": ("ReduceOptions", 1), "broadcast": ("BroadcastOptions", 1), "barrier": ("BarrierOptions", 0)}
    | dict.fromkeys(("gather", "gather_single", "gather_into_tensor"), ("GatherOptions", 2))
    | {"scatter": ("ScatterOptions", 2), "alltoall": ("AllToAllOptions", 2)}
    | dict.fromkeys(("alltoall_base", "all_to_all_single"), ("AllToAllOptions", 4))
    | dict.fromkeys(("send", "recv"), ("", 3))
    | {"recv_anysource": ("", 2)}
)
_IN_ORDER = ("output", "output_tensor", "outputs", "outputTensor", "output_tensors", "output_lists")
_BEHIND = ("input", "input_tensor", "inputs", "inputTensor", "input_tensors", "input_list")
_SPLITS = ("output_split_sizes", "input_split_sizes")
_NAMES = ("tensor", "tensors", *_IN_ORDER, *_BEHIND, "dstRank", "srcRank", "tag", "arg0", "arg1", *_SPLITS)


def in_places(verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments in the one form. Raises UsageError for one that no form has."""
    kind, places = _shape_of(verb)
    if not kwargs and (len(args) == places or (len(args) == places + 1 and type(args[places]).__name__ == kind)):
        return args if not args or not _single(verb, args) else _in_lists(verb, args)
    named = sorted((key for key in kwargs if key in _NAMES), key=_NAMES.index)
    given = (*args[:places], *(kwargs[key] for key in named))
    rest = [*args[places:], *(value for key, value in kwargs.items() if key not in _NAMES)]
    if len(given) != places:
        raise UsageError(f"{verb} was called with {len(given)} arguments where it takes {places}")
    given = _in_lists(verb, given) if _single(verb, given) else given
    return (*given, *_options(verb, kind, [value for value in rest if value is not None]))


def _shape_of(verb: str) -> tuple[str, int]:
    if verb in _OTHERS:
        return _OTHERS[verb]
    return ("ReduceScatterOptions" if "reduce" in verb else "AllgatherOptions", 2)


def _single(verb: str, given: Sequence[Any]) -> bool:
    if verb in ("allreduce", "reduce", "broadcast", "reduce_scatter", "scatter"):
        return isinstance(given[0], torch.Tensor)
    return verb in ("allgather", "gather") and isinstance(given[1], torch.Tensor)


def _in_lists(verb: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    if verb in ("allreduce", "reduce", "broadcast"):
        return ([given[0]], *given[1:])
    # Of the two, the one that is a list is empty on all but the root (gather, scatter).
    outputs, inputs = ([each] if isinstance(each, torch.Tensor) or len(each) else [] for each in given[:2])
    return (outputs, inputs, *given[2:])


def _options(verb: str, kind: str, rest: list[Any]) -> list[Any]:
    if not rest or (len(rest) == 1 and type(rest[0]).__name__ == kind):
        return rest
    options: Any = OPTIONS[kind]() if kind else None
    for value in rest:
        if isinstance(value, timedelta) and hasattr(options, "timeout"):
            options.timeout = value
        elif isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)) and hasattr(options, "reduceOp"):
            options.reduceOp = value if isinstance(value, dist.ReduceOp) else dist.ReduceOp(value)
        elif isinstance(value, int) and hasattr(options, "rootRank"):
            options.rootRank = value
        else:
            raise UsageError(f"{verb} was called with a {type(value).__name__} that it does not take")
    return [options]
