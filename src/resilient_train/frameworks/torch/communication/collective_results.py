"""The collectives of ``ProcessGroup``: which tensors of a call are inputs, and what it gives from all members' inputs.

*Movement* verbs (broadcast, gathers, scatter, all-to-all) copy, so any member can work out its own result once it knows
the inputs that it needs. *Arithmetic* verbs (reductions) round; where bits matter they are added up as the library does
it (``clique.py``). Where a rank is alone for a while, each verb gives what it would if every other member gave what
this one does: a reduction over one rank is its input. The values do not matter there; that nothing blocks does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined] # not in torch's stub

Args = Sequence[Any]
Tensors = list[torch.Tensor]
Of = Callable[[int], Args | None]
"""The arguments of a member's call, by its rank in the group; None: it died before it made it."""

POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
"""gloo's works for these have no future, and may be waited for once only."""


AS_IT_LIES = frozenset({"allreduce", "reduce", "broadcast", "scatter"})
"""gloo takes the memory behind these verbs' tensors as it lies, transposed or not; for the others it makes copies."""


class Verb(NamedTuple):
    """``given(args, me)`` are the tensors that a call takes in on member ``me``; ``move(me, size, args, of)`` fills
    the call's outputs from the members' inputs (None: a reduction). ``filled(args, me)`` are the outputs: all that
    differs afterwards. (A reduction to one member leaves partial results with the others.)
    """

    given: Callable[[Args, int], Tensors]
    move: Callable[[int, int, Args, Of], None] | None = None
    filled: Callable[[Args, int], Tensors] = lambda _args, _me: []
    alone: Callable[[int, int, Args], None] = lambda _me, _size, _args: None
    """What a reduction gives on a rank that is alone."""


_NO_STREAMS = {torch.device("cpu"), torch.device("meta")}


def done(result: Any) -> dist.Work:
    """A work that is complete already."""
    elsewhere = {each.device for each in flat(result) if isinstance(each, torch.Tensor)} - _NO_STREAMS
    future: torch.futures.Future[Any] = torch.futures.Future(devices=list(elsewhere) or None)
    future.set_result(result)
    work: dist.Work = _create_work_from_future(future)
    return work


class DoneMessage(dist.Work):
    """A message that is over already, and from whom it was."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - it is over
        return True

    def is_completed(self) -> bool:
        return True

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank  # torch's own recv() asks for this one

    def synchronize(self) -> None:
        pass


def run_alone(verb: str, me: int, size: int, args: Args) -> dist.Work:
    """The verb on a rank that is alone. A message from anybody is not from itself: torch refuses that."""
    if verb in POINT_TO_POINT:
        return DoneMessage((me + 1) % size if verb == "recv_anysource" else args[1])
    known = VERBS.get(verb)
    if known is not None:
        if known.move is not None:
            known.move(me, size, args, lambda _member: args)
        else:
            known.alone(me, size, args)
    return completed(args)


def completed(args: Args) -> dist.Work:
    """The work of a call with these arguments, whose outputs are filled."""
    first = args[0] if args else []
    return done(list(first) if isinstance(first, (list, tuple)) else [first] if isinstance(first, torch.Tensor) else [])


def _list(value: Any) -> Tensors:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def flat(value: Any) -> Tensors:
    """The tensors, or whatever it is, in lists of lists of them."""
    return [tensor for each in _list(value) for tensor in _list(each)]


def root_of(args: Args) -> int:
    """The member that a call names in its options."""
    return next((int(each.rootRank) for each in args if hasattr(each, "rootRank")), 0)


def _first(args: Args, _me: int) -> Tensors:
    return _list(args[0])


def _first_flat(args: Args, _me: int) -> Tensors:
    return flat(args[0])


def _second(args: Args, _me: int) -> Tensors:
    return _list(args[1])


def _second_flat(args: Args, _me: int) -> Tensors:
    return flat(args[1])


def _of_root(args: Args, me: int) -> Tensors:
    return _list(args[0]) if me == root_of(args) else []


def _broadcast(me: int, _size: int, args: Args, of: Of) -> None:
    theirs = of(root_of(args)) if me != root_of(args) else None
    if theirs is not None:
        for place, value in zip(_list(args[0]), _list(theirs[0]), strict=True):
            if place is not value:
                _copy_as_it_lies(place, value)


def _allgather(_me: int, size: int, args: Args, of: Of) -> None:
    for member in range(size):
        _put([places[member] for places in args[0]], of(member))


def _allgather_lists(_me: int, size: int, args: Args, of: Of) -> None:
    for member in range(size):
        _put(args[0][member], of(member))


def _put(places: Tensors, theirs: Args | None) -> None:
    """What a member gives; zeros if that is not known."""
    if theirs is None:
        for place in places:
            place.zero_()
        return
    for place, value in zip(places, _list(theirs[1]), strict=True):
        place.copy_(value.reshape(place.shape))


def _allgather_into(_me: int, size: int, args: Args, of: Of) -> None:
    for member in range(size):
        _put([output.view(-1).tensor_split(size)[member] for output in _list(args[0])], of(member))


def _gather(me: int, size: int, args: Args, of: Of) -> None:
    if me == root_of(args) and args[0]:
        _allgather(me, size, args, of)


def _gather_into(me: int, size: int, args: Args, of: Of) -> None:
    if me == root_of(args):
        _allgather_into(me, size, args, of)


def _scatter(me: int, _size: int, args: Args, of: Of) -> None:
    theirs = of(root_of(args))
    for output, parts in zip(args[0], theirs[1] if theirs is not None else [], strict=False):
        _copy_as_it_lies(output, parts[me])


def _copy_as_it_lies(place: torch.Tensor, value: torch.Tensor) -> None:
    if place.stride() == value.stride():
        place.copy_(value)
    else:
        in_memory(place).copy_(in_memory(value))


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in one piece of memory, in whatever order, each once."""
    dense: bool = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense


def _given_to_scatter(args: Args, me: int) -> Tensors:
    return flat(args[1]) if me == root_of(args) else []


def _alltoall(me: int, size: int, args: Args, of: Of) -> None:
    for member in range(size):
        theirs = of(member)
        _copy_alike(args[0][member], theirs[1][me] if theirs is not None else None)


def _alltoall_into(me: int, size: int, args: Args, of: Of) -> None:
    outputs = _split(args[0], args[2], size)
    for member in range(size):
        theirs = of(member)
        _copy_alike(outputs[member], _split(theirs[1], theirs[3], size)[me] if theirs is not None else None)


def _split(tensor: torch.Tensor, sizes: Any, parts: int) -> Sequence[torch.Tensor]:
    return torch.split(tensor, list(sizes)) if sizes else tensor.tensor_split(parts)


def _copy_alike(place: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is not None and place.shape == value.shape:  # on a rank that is alone they may differ
        place.copy_(value)
    else:
        place.zero_()


def _wait_for_all(_me: int, size: int, _args: Args, of: Of) -> None:
    for member in range(size):
        of(member)


def _own_part(me: int, _size: int, args: Args) -> None:
    for output, parts in zip(_list(args[0]), args[1], strict=True):
        output.copy_(parts[me])


def _own_chunk(me: int, size: int, args: Args) -> None:
    for output, value in zip(_list(args[0]), _list(args[1]), strict=True):
        output.view(-1).copy_(value.reshape(-1).tensor_split(size)[me])


_REDUCE = Verb(_first, filled=_first)
_SCATTERED = Verb(_second_flat, filled=_first, alone=_own_part)
_SCATTERED_CHUNKS = Verb(_second, filled=_first, alone=_own_chunk)
_GATHERED_INTO = Verb(_second, _allgather_into, filled=_first)
_EXCHANGED_INTO = Verb(_second, _alltoall_into, filled=_first)
_GATHERED_INTO_ONE = Verb(_second, _gather_into, filled=_first)
_ALL: dict[str, Verb] = {
    "allreduce": _REDUCE,
    "allreduce_coalesced": _REDUCE,
    "reduce": _REDUCE,
    "reduce_scatter": _SCATTERED,
    "_reduce_scatter_base": _SCATTERED_CHUNKS,
    "reduce_scatter_single": _SCATTERED_CHUNKS,
    "reduce_scatter_tensor_coalesced": _SCATTERED_CHUNKS,
    "reduce_scatter_single_coalesced": _SCATTERED_CHUNKS,
    "broadcast": Verb(_of_root, _broadcast, filled=_first),
    "allgather": Verb(_second, _allgather, filled=_first_flat),
    "allgather_coalesced": Verb(_second, _allgather_lists, filled=_first_flat),
    "_allgather_base": _GATHERED_INTO,
    "all_gather_single": _GATHERED_INTO,
    "allgather_into_tensor_coalesced": _GATHERED_INTO,
    "all_gather_single_coalesced": _GATHERED_INTO,
    "gather": Verb(_second, _gather, filled=_first_flat),
    "gather_single": _GATHERED_INTO_ONE,
    "gather_into_tensor": _GATHERED_INTO_ONE,
    "scatter": Verb(_given_to_scatter, _scatter, filled=_first),
    "alltoall": Verb(_second, _alltoall, filled=_first),
    "alltoall_base": _EXCHANGED_INTO,
    "all_to_all_single": _EXCHANGED_INTO,
    "barrier": Verb(lambda _args, _me: [], _wait_for_all),
}
VERBS = {name: verb for name, verb in _ALL.items() if hasattr(dist.ProcessGroup, name)}
"""By the name of ``ProcessGroup``'s method; its arguments stand as torch passes them. Those that this torch has."""
