"""A collective in one word of 64 bits, by which its members see that they mean the same one.

gloo and NCCL match collectives by their order alone. Two members that call different ones at the same place wait for
each other for ever, or, where the bytes come out even, take each other's numbers for their own. So each member writes
the word of what it begins beside its place in the order, and looks at its two neighbours'
(``TorchCollectives.compare``). All members are neighbours of neighbours: where any two differ, two neighbours do, and
the later of them sees it.

In a word is what has to be the same on all members, and nothing else: what one gives to a gather or to an all-to-all
may have another size than what the others give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from resilient_train.frameworks.torch.communication.collective_results import flat, root_of

_REDUCED_FIRST = ("allreduce", "allreduce_coalesced", "reduce")
_REDUCED_SECOND = (
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
)
"""What all members give has the same size."""
_MOVED = (
    *("broadcast", "allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
)
"""What all members get has the same size, in bytes."""
_OTHERS = (
    *("gather", "gather_single", "gather_into_tensor", "scatter"),
    *("alltoall", "alltoall_base", "all_to_all_single", "barrier", "monitored_barrier"),
)
_ROOTED = frozenset({"reduce", "broadcast", "gather", "gather_single", "gather_into_tensor", "scatter"})
_SIZE_BITS, _DTYPE_BITS, _OPERATION_BITS, _ROOT_BITS, _VERB_BITS = 37, 6, 4, 11, 6
"""From the lowest; what does not fit in is cut off, on all members alike."""
_DTYPE_AT = _SIZE_BITS
_OPERATION_AT = _DTYPE_AT + _DTYPE_BITS
_ROOT_AT = _OPERATION_AT + _OPERATION_BITS
_VERB_AT = _ROOT_AT + _ROOT_BITS


class _Form(NamedTuple):
    head: int
    """The verb's part of the word."""
    sized: int | None
    """Which argument has the same size on all members."""
    reduces: bool
    rooted: bool


def _forms() -> dict[str, _Form]:
    sized = dict.fromkeys((*_REDUCED_FIRST, *_MOVED), 0) | dict.fromkeys(_REDUCED_SECOND, 1)
    reduces = frozenset((*_REDUCED_FIRST, *_REDUCED_SECOND))
    every = enumerate((*_REDUCED_FIRST, *_REDUCED_SECOND, *_MOVED, *_OTHERS), 1)
    return {
        verb: _Form(number << _VERB_AT, sized.get(verb), verb in reduces, verb in _ROOTED) for number, verb in every
    }


_FORMS = _forms()
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_NUMBERS = {dtype: number << _DTYPE_AT for number, dtype in enumerate(_DTYPES)}
_OPERATIONS: Any = dist.ReduceOp.RedOpType  # torch's stub leaves its members out
_SUM = int(_OPERATIONS.SUM)
assert _VERB_AT + _VERB_BITS == 64
assert len(_FORMS) < 1 << _VERB_BITS
assert len(_DTYPES) <= 1 << _DTYPE_BITS


def word_of(verb: str, args: Sequence[Any]) -> int:
    """Never 0. Called for each collective."""
    word, sized, reduces, rooted = _FORMS[verb]
    if sized is not None:
        given, size = args[sized], 0
        tensors = given if type(given) is list and given and type(given[0]) is not list else flat(given)
        if reduces:
            for each in tensors:
                size += each.numel()
            if tensors:
                word |= _NUMBERS[tensors[0].dtype]
            word |= _operation_of(args) << _OPERATION_AT
        else:
            for each in tensors:
                size += each.nbytes
        word |= size & (1 << _SIZE_BITS) - 1
    if rooted:
        word |= (root_of(args) & (1 << _ROOT_BITS) - 1) << _ROOT_AT
    return word


def told(word: int) -> str:
    """For people: ``allreduce (SUM) of 4 x float32``."""
    verb, form = next((verb, form) for verb, form in _FORMS.items() if form.head >> _VERB_AT == word >> _VERB_AT)
    size = word & (1 << _SIZE_BITS) - 1
    if form.reduces:
        number = word >> _OPERATION_AT & (1 << _OPERATION_BITS) - 1
        name = next((name for name, each in _OPERATIONS.__members__.items() if int(each) == number), "?")
        dtype = _DTYPES[word >> _DTYPE_AT & (1 << _DTYPE_BITS) - 1]
        verb += f" ({name}) of {size} x {str(dtype).removeprefix('torch.')}"
    elif form.sized is not None:
        verb += f" of {size} bytes"
    return f"{verb}, root {word >> _ROOT_AT & (1 << _ROOT_BITS) - 1}" if form.rooted else verb


def _operation_of(args: Sequence[Any]) -> int:
    options = args[-1]  # as torch passes them; a user who calls a group's method may leave them out
    return int(options.reduceOp.op) if hasattr(options, "reduceOp") else _SUM
