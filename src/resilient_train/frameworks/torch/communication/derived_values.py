"""Results of collectives before the loop that are not kept for a new process, and all that a script computes of them.

A process that takes a rank's place is not given such a result (``set_up.py``), and need not be if it has gone into
registered tensors, whose content it is given when its loop begins. Until then they hold something else there, and so
would all that is computed of them: a mask, a threshold, a copy. From the first such result on, each operation of torch
in this thread is therefore looked at until the loop begins, and memory that depends on such a result is followed, in
the first process of a rank as in those that take its place:

* a number that leaves the tensors (``item()``, ``if``, ``tolist()``, ``numpy()``, how many elements a mask has) is
  recorded, and given again;
* memory that is still there when the loop begins, and not registered, is recorded and given again if it is small, and
  refused else.

Not seen: what other threads and processes compute (a loader's workers), and what code does that has only the address of
the memory (an extension; what torch.compile has made; ``torch.save``). A new process has NaN there, and integers are 0.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from resilient_train.frameworks.torch.communication.call_codec import bytes_of, fill_all
from resilient_train.frameworks.torch.tensors.storages import Memory
from resilient_train.frameworks.torch.watching.operations import (
    form_of,
    has_memory,
    in_backward,
    in_memory,
    memories,
    put_below,
    sorted_arguments,
    storage_of,
    take_out,
)
from resilient_train.frameworks.torch.watching.replaced import replace
from resilient_train.script_place import is_ours, line
from resilient_train.state.set_up_record import RESULT_BYTES

_BY_FORM = frozenset(
    {
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    }
)
"""They ask for the form of a tensor only."""
_NUMBERS = frozenset({"_local_scalar_dense", "item", "equal", "allclose", "is_nonzero"})
_METHODS = ("tolist", "numpy", "__dlpack__")
"""Of torch.Tensor: they hand out values, and are no operations."""
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
"""Namespaces: what these give is told by who carries them out."""
_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - names in code are text
_ROOM = 1 << 10
PASSES = 1000
"""So many backward passes are looked at: in a script that has no Session, each takes longer for that."""
_IS = "is still there"
_MAY_BE = (
    "may still be there (its memory is an array's, a buffer's or a file's, or another thread has it: communicate a "
    "clone() of it, in the main thread)"
)

Read = Callable[[torch.Tensor, bool], torch.Tensor]
"""Is told what the script reads, and whether it ``may`` be what it was at first; returns what it read there."""


class _Origin(NamedTuple):
    """What memory depends on: ``call`` gave the result, at the line ``called``."""

    call: str
    called: str
    place: str = ""
    """The line that has computed this of it; empty: it is the result itself."""
    elsewhere: bool = False
    """The memory is not torch's own, and may be there when torch has left it; or nobody sees what is computed of it."""
    sparse: bool = False
    """It is a part of a tensor."""
    may: bool = False
    """It may be what it was in the first process."""

    @property
    def can_be_given(self) -> bool:
        """In a new process too."""
        return not self.elsewhere and not self.sparse

    @property
    def where(self) -> str:
        """The line that has made it."""
        return self.place or self.called


class DerivedValues(TorchDispatchMode):
    """Those of this process."""

    supports_higher_order_operators = True

    def __init__(self, read: Read) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read
        self._origins: dict[int, tuple[StorageWeakRef, _Origin]] = {}
        """By the address of the storage, which is not used again as long as somebody has a reference to it."""
        self._room = _ROOM
        self._rooms = set[StorageWeakRef]()
        self._thread = 0
        """That is looked at; 0: none."""
        self._entered = 0
        """In which thread this mode was entered last, and perhaps not left."""
        self._process = 0
        self._misses = False
        self._replaced: list[Callable[[], None]] = []
        """What puts functions of torch's back."""
        self._leave_passes: Callable[[], None] | None = None
        """Puts torch's function back that begins a backward pass, if it is replaced."""
        self.passes = 0
        """How many there were."""
        self._ended = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile would compile nothing in front of the loop, and its results have other bits then."""
        return True

    def are_results(self, tensors: Iterable[torch.Tensor], call: str, called: str, *, may: bool = False) -> None:
        """They are not kept, of this ``call`` at the line ``called``. They ``may`` be what they were in the first
        process: until ``are_as_at_first``.
        """
        # A backward pass of the loop's thread may run in one of torch's, where the mode is on if it was on before.
        in_pass, main = in_backward(), threading.main_thread().ident
        seen = bool(self._thread) if in_pass else threading.get_ident() == (self._thread or main)
        for tensor, sparse in memories(list(tensors)):
            if (held := self._origin([tensor])) is None or held.may or not may:
                elsewhere = not seen or _is_elsewhere(tensor)
                self._follow(tensor, _Origin(call, called, "", elsewhere, sparse, may))
        if self._origins and not self._thread and seen:
            self._begin()

    def are_missing(self, tensors: Iterable[torch.Tensor]) -> None:
        """This process has not got them: NaN stands there, so that what is made of it unseen can be seen, as a rule.
        Integers may be places in a table, so they are such.
        """
        self._misses = True
        _spoil(tensors)

    def are_own(self, tensors: Iterable[torch.Tensor], arguments: Sequence[Any]) -> None:
        """They hold what this process has given itself, in the ``arguments`` of a call."""
        origin = self._origin(in_memory(arguments)) if self._looks else None
        if origin is not None:
            self._depend(origin, self._new(origin, list(tensors)))

    def are_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """They hold what they held in the first process."""
        if self._looks:
            self._forget(in_memory(list(tensors)))

    def are_room(self, tensors: Iterable[torch.Tensor]) -> None:
        """Torch writes them anew before it reads them."""
        if self._looks:
            self._rooms.update(map(storage_of, in_memory(list(tensors))))

    def are_as_at_first(self) -> None:
        """All that may be what it was in the first process is."""
        self._origins = {key: each for key, each in self._origins.items() if not each[1].may}

    def look_from_next_pass(self) -> None:
        """A backward pass that begins from now on is looked at. (A mode that begins within one ends with it.)"""
        if self._leave_passes is not None:
            return
        autograd: Any = torch.autograd
        run = autograd._engine_run_backward

        def look_and_run(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            may = not self._thread and not self._ended and self.passes <= PASSES
            if may and threading.current_thread() is threading.main_thread():
                self._begin()
            try:
                return run(*args, **kwargs)
            finally:
                # Where it has ended within the pass, autograd has put the mode back.
                if self._ended or (self.passes >= PASSES and not self._origins):
                    self._stop()

        self._leave_passes = replace(autograd, "_engine_run_backward", look_and_run)

    def end(self) -> None:
        """Of looking: the loop begins, or nothing is recorded any more."""
        self._stop()
        self._ended = True
        if self._leave_passes is not None:
            self._leave_passes()

    def _stop(self) -> None:
        # Within an operation that it sees it is in again when that is over, and sees nothing: the loop takes it out.
        if self._entered == threading.get_ident():
            take_out(self)
        self._thread = 0
        for put_back in reversed(self._replaced):
            put_back()
        self._replaced.clear()

    def problem(
        self,
        registered: Callable[[], Memory],
        keep: Callable[[str, bytes], bool],
        gradients: Callable[[], Memory] = frozenset,
    ) -> str:
        """Why a process that takes the rank's place would not have what is there; empty if it would. ``keep``: takes
        the line that has made something small, and its bytes, if it has room for that. ``gradients``: of what is
        registered, which the loop drops, as a rule.
        """
        for ref, origin, needed in self._left(registered, gradients):
            tensor = _small_in(ref, origin)
            if (tensor is not None and keep(origin.where, bytes_of(tensor))) or not needed:
                continue
            if origin.place:
                return (
                    f"{origin.place} computes something before the loop of what came of {origin.call} at "
                    f"{origin.called}, and that {_MAY_BE if origin.elsewhere else _IS}, and not registered: a process "
                    "that replaces this rank would compute something else. Register it too (Session(model=[...]), a "
                    "buffer, state=), compute it in a body, or delete it (of a small part of it, keep a clone())"
                )
            return (
                f"{origin.called} calls {origin.call} before the loop, and its result can't be kept (only up to "
                f"{RESULT_BYTES // 1024} KiB each), {_MAY_BE if origin.elsewhere else _IS}, and does not lie in "
                "registered tensors: a process that replaces this rank would go without. Register it, delete it (an "
                "array: copy()), make it on each rank alone, or read it from a file"
            )
        return ""

    def give(
        self,
        registered: Callable[[], Memory],
        kept: Callable[[str, int], bytes | None],
        gradients: Callable[[], Memory] = frozenset,
    ) -> str:
        """Puts into what is there what the first process had there. ``kept``: for the line that has made something, and
        its number of bytes. Returns the line of the first thing for which there is nothing; empty if there is none.
        """
        for ref, origin, needed in self._left(registered, gradients):
            tensor = _small_in(ref, origin)
            data = kept(origin.where, tensor.nbytes) if tensor is not None else None
            if tensor is not None and data is not None:
                fill_all([tensor], data)
            elif needed:
                return origin.where
        return ""

    @property
    def _looks(self) -> bool:
        """Not in a process that was forked off."""
        return bool(self._thread) and self._process == os.getpid()

    def _left(
        self, registered: Callable[[], Memory], gradients: Callable[[], Memory]
    ) -> list[tuple[StorageWeakRef, _Origin, bool]]:
        """And whether it is needed: the script may have kept a gradient, or DDP's room, by another name."""
        left = self._there(registered)
        if left:
            gc.collect()
            left = self._there(registered)
        dropped = self._rooms | gradients() if left else frozenset()
        found = [(ref, origin, ref not in dropped) for ref, origin in left]
        return sorted(found, key=lambda each: not each[2])

    def _there(self, registered: Callable[[], Memory]) -> list[tuple[StorageWeakRef, _Origin]]:
        found = [each for each in self._origins.values() if each[1].elsewhere or has_memory(each[0])]
        held = registered() if found else frozenset()
        return [each for each in found if each[0] not in held]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not self._looks:
            return func(*args, **named)
        form = form_of(func)
        read, written = sorted_arguments(form, args, named)
        origin = None if form.namespace in _COLLECTIVES else self._origin(read)
        if origin is None:
            result = func(*args, **named)
            if form.unread:
                self._forget(in_memory(written))
            return result
        try:
            result = func(*args, **named)
        except RuntimeError:  # a decomposition of NaN fails, and so does a draw by it
            if not self._misses or written:
                raise
            result = func(*_likely(args), **named)
            _spoil(in_memory(result))
        if form.name in _BY_FORM:
            return result
        is_number = form.name in _NUMBERS and type(result) in _DTYPES
        if (is_number or form.sizes_by_value) and is_ours(_TORCH):
            return result
        if is_number:
            return self._read(torch.tensor(result, dtype=_DTYPES[type(result)], device="cpu"), origin.may).item()
        if form.sizes_by_value:
            result = self._of_the_same_sizes(result, origin)
        if (new := self._new(origin, [result, written])) and not is_ours(_TORCH):
            self._depend(origin, new)
        return result

    def _begin(self) -> None:
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._entered = self._thread
        put_below(self)
        for name in _METHODS:
            self._replaced.append(replace(torch.Tensor, name, _handing_out(self, getattr(torch.Tensor, name))))

    def hand_out(self, tensor: torch.Tensor) -> None:
        """The script takes out all values of a tensor: they are there then as they were in the first process. In its
        own memory, which an array shares.
        """
        if not self._looks or self._thread != threading.get_ident():
            return
        origin = self._origin(in_memory(tensor))
        if origin is not None and not is_ours(_TORCH) and (at_first := self._read(tensor, origin.may)) is not tensor:
            self._put(at_first, tensor)

    def _put(self, values: torch.Tensor, tensor: torch.Tensor) -> None:
        """It is followed all the same, as in the first process."""
        keys = [each.untyped_storage()._cdata for each in in_memory(tensor)]
        held = {key: self._origins[key] for key in keys if key in self._origins}
        tensor.data.copy_(values)  # nothing that autograd has kept is another tensor by that
        self._origins.update(held)

    def _origin(self, tensors: Iterable[torch.Tensor]) -> _Origin | None:
        """One that is another one than at first, if there is such a one."""
        found: _Origin | None = None
        for tensor in tensors:
            held = self._origins.get(tensor.untyped_storage()._cdata)
            if held is not None and (found is None or found.may):
                found = held[1]
        return found

    def _follow(self, tensor: torch.Tensor, origin: _Origin) -> None:
        self._origins[tensor.untyped_storage()._cdata] = storage_of(tensor), origin

    def _new(self, on: _Origin, made: Any) -> list[tuple[torch.Tensor, bool]]:
        """A storage keeps its first origin, but for one of which it was not known whether it is one."""
        return [
            each for each in memories(made) if (held := self._origin(each[:1])) is None or (held.may and not on.may)
        ]

    def _depend(self, on: _Origin, new: Iterable[tuple[torch.Tensor, bool]]) -> None:
        place = line()
        for tensor, sparse in new:
            self._follow(tensor, _Origin(on.call, on.called, place, _is_elsewhere(tensor), sparse, on.may))
        if len(self._origins) > self._room:
            self._origins = {
                key: (ref, origin)
                for key, (ref, origin) in self._origins.items()
                if origin.elsewhere or has_memory(ref)
            }
            self._room = max(_ROOM, 2 * len(self._origins))

    def _forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """They were written anew. What lies beside a view was not."""
        for tensor in tensors:
            if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                self._origins.pop(tensor.untyped_storage()._cdata, None)

    def _of_the_same_sizes(self, result: Any, origin: _Origin) -> Any:
        """How many elements there are depends on values, and a script can see it."""
        tensors: list[torch.Tensor] = [result] if isinstance(result, torch.Tensor) else list(result)
        mine = torch.tensor([size for each in tensors for size in each.shape], device="cpu")
        at_first = self._read(mine, origin.may).tolist()
        if at_first == mine.tolist():
            return result
        made = []
        for each in tensors:
            shape, at_first = at_first[: each.dim()], at_first[each.dim() :]
            made.append(each.new_zeros(shape))
        _spoil(made)
        return made[0] if isinstance(result, torch.Tensor) else tuple(made)


def _spoil(tensors: Iterable[torch.Tensor]) -> None:
    for each in in_memory(list(tensors)):
        each.fill_(torch.nan if each.is_floating_point() or each.is_complex() else 0)


def _likely(value: Any) -> Any:
    """In the place of NaN: numbers that every operation takes (a probability, a positive-definite matrix, no error)."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_likely, value))
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.zeros_like(value)
    if made.is_floating_point():
        (made.diagonal(dim1=-2, dim2=-1) if made.dim() > 1 else made).fill_(1.0)
    return made


def _handing_out(derived: DerivedValues, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            derived.hand_out(tensor)
        return real(tensor, *args, **kwargs)

    return method


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return not tensor.untyped_storage().resizable()


def _small_in(ref: StorageWeakRef, origin: _Origin) -> torch.Tensor | None:
    """The bytes, if they are few, and a new process has them too."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata) if origin.can_be_given else None
    if storage is None or storage.nbytes() > RESULT_BYTES:
        return None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
