"""Results of collectives before the loop that are not kept for a new process, and all that a script computes of them.

A process that takes a rank's place is not given such a result (``set_up.py``), and need not be if it has gone into
registered tensors, whose content it is given when its loop begins. Until then they hold something else there, and so
would all that is computed of them: a mask, a threshold, a copy. From the first such result on, each operation of torch
in this thread is therefore looked at until the loop begins, and memory that depends on such a result is followed, in
the first process of a rank as in those that take its place:

* a number that leaves the tensors (``item()``, ``if``, ``tolist()``, ``numpy()``, how many elements a mask has) is
  recorded, and given again;
* memory that is still there when the loop begins must be registered.

Not seen: what other threads and processes compute (a loader's workers), and what code does that has only the address of
the memory (an extension; what torch.compile has made; ``torch.save``). A new process has NaN there, and integers are 0.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode, is_traceable_wrapper_subclass

from resilient_train.frameworks.torch.storages import Memory
from resilient_train.script_place import is_ours, line
from resilient_train.state.set_up_record import RESULT_BYTES

_BY_FORM = frozenset(
    {
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    }
)
"""They ask for the form of a tensor only."""
_OVERWRITE = frozenset(
    {
        *("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_"),
        *("_foreach_copy_", "_foreach_zero_"),
    }
)
"""They don't ask for what was there."""
_NUMBERS = frozenset({"_local_scalar_dense", "item", "equal", "allclose", "is_nonzero"})
_METHODS = ("tolist", "numpy", "__dlpack__")
"""Of torch.Tensor: they hand out values, and are no operations."""
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_SPARSE = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
"""Namespaces: what these give is told by who carries them out."""
_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - names in code are text
_ROOM = 1 << 10
_NO_PASS = -1
_current_pass = torch._C._current_graph_task_id
_IS = "is still there"
_MAY_BE = (
    "may still be there (its memory is an array's, a buffer's or a file's, or another thread has it: communicate a "
    "clone() of it, in the main thread)"
)

Read = Callable[[torch.Tensor], torch.Tensor]
"""Is told what the script reads; returns what it read in the first process."""


class _Origin(NamedTuple):
    """What memory depends on: ``call`` gave the result, at the line ``called``; ``place`` computed this of it, empty if
    it is the result itself. ``elsewhere``: the memory is not torch's own, and may be there when torch has left it; or
    nobody sees what is computed of it.
    """

    call: str
    called: str
    place: str = ""
    elsewhere: bool = False


class _Form(NamedTuple):
    """What is known of an operation by its declaration: of its arguments, which it writes, and does not read."""

    name: str = ""
    namespace: str = ""
    arguments: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    sizes_by_value: bool = False


class DerivedValues(TorchDispatchMode):
    """Those of this process."""

    supports_higher_order_operators = True

    def __init__(self, read: Read) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read
        self._origins: dict[StorageWeakRef, _Origin] = {}
        self._room = _ROOM
        self._rooms = set[StorageWeakRef]()
        self._thread = 0
        """That is looked at; 0: none."""
        self._entered = 0
        """In which thread this mode was entered last, and perhaps not left."""
        self._process = 0
        self._misses = False
        self._were: dict[str, Any] = {}
        """Methods of torch.Tensor that are replaced for now."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile would compile nothing in front of the loop, and its results have other bits then."""
        return True

    def are_results(self, tensors: Iterable[torch.Tensor], call: str, called: str) -> None:
        """They are not kept, of this ``call`` at the line ``called``."""
        thread = threading.get_ident()
        # A backward pass of the loop's thread may run in one of torch's, where the mode is on as well.
        seen = thread == (self._thread or threading.main_thread().ident) or _current_pass() != _NO_PASS
        for tensor in _in_memory(list(tensors)):
            self._origins[_storage(tensor)] = _Origin(call, called, elsewhere=not seen or _is_elsewhere(tensor))
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
        origin = self._origin(_in_memory(arguments)) if self._looks else None
        if origin is not None:
            self._depend(origin, _in_memory(list(tensors)))

    def are_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """They hold what they held in the first process."""
        if self._looks:
            self._forget(_in_memory(list(tensors)))

    def are_room(self, tensors: Iterable[torch.Tensor]) -> None:
        """Torch writes them anew before it reads them."""
        if self._looks:
            self._rooms.update(map(_storage, _in_memory(list(tensors))))

    def are_none(self) -> None:
        """All results of before hold what they held in the first process."""
        self._origins.clear()
        self.end()

    def end(self) -> None:
        """Of looking: the loop begins, or nothing is recorded any more."""
        # Within an operation that it sees it is in again when that is over, and sees nothing: the loop takes it out.
        if self._entered == threading.get_ident():
            _take_out(self)
        self._thread = 0
        for name, was in self._were.items():
            setattr(torch.Tensor, name, was)
        self._were.clear()

    def problem(self, registered: Callable[[], Memory]) -> str:
        """Why a process that takes the rank's place would not have what is there; empty if it would."""
        for origin in self._left(registered):
            if origin.place:
                return (
                    f"{origin.place} computes something before the loop of what came of {origin.call} at "
                    f"{origin.called}, and that {_MAY_BE if origin.elsewhere else _IS}, and not registered: a process "
                    "that replaces this rank would compute something else. Register it too (Session(model=[...]), a "
                    "buffer, state=), compute it in a body, or delete it (a gradient: zero_grad())"
                )
            return (
                f"{origin.called} calls {origin.call} before the loop, and its result can't be kept (only up to "
                f"{RESULT_BYTES // 1024} KiB each), {_MAY_BE if origin.elsewhere else _IS}, and does not lie in "
                "registered tensors: a process that replaces this rank would go without. Register it, delete it (a "
                "gradient: zero_grad(); an array: copy()), make it on each rank alone, or read it from a file"
            )
        return ""

    def place(self, registered: Callable[[], Memory]) -> str:
        """Where something is computed that is still there and not registered; empty if nothing is."""
        return next((origin.place or origin.called for origin in self._left(registered)), "")

    @property
    def follows(self) -> bool:
        """Whether there is anything."""
        return bool(self._origins)

    @property
    def _looks(self) -> bool:
        """Not in a process that was forked off."""
        return bool(self._thread) and self._process == os.getpid()

    def _left(self, registered: Callable[[], Memory]) -> Sequence[_Origin]:
        left = self._there(registered)
        if left:
            gc.collect()
            left = self._there(registered)
        return left

    def _there(self, registered: Callable[[], Memory]) -> Sequence[_Origin]:
        found = {
            ref: origin
            for ref, origin in self._origins.items()
            if ref not in self._rooms and (origin.elsewhere or _has_memory(ref))
        }
        held = registered() if found else frozenset()
        return [origin for ref, origin in found.items() if ref not in held]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not self._looks:
            return func(*args, **named)
        form = _form(func)
        read, written = _sorted(form, args, named)
        origin = None if form.namespace in _COLLECTIVES else self._origin(read)
        if origin is None:
            result = func(*args, **named)
            if form.unread:
                self._forget(written)
            return result
        try:
            result = func(*args, **named)
        except RuntimeError:  # a decomposition of NaN fails, and so does a draw by it
            if not self._misses or written:
                raise
            result = func(*_likely(args), **named)
            _spoil(_in_memory(result))
        if form.name in _BY_FORM or is_ours(_TORCH):
            return result
        if form.name in _NUMBERS and type(result) in _DTYPES:
            return self._read(torch.tensor(result, dtype=_DTYPES[type(result)])).item()
        if form.sizes_by_value:
            result = self._of_the_same_sizes(result)
        self._depend(origin, [*_in_memory(result), *written])
        return result

    def _begin(self) -> None:
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._entered = self._thread
        _put_below(self)
        for name in _METHODS:
            self._were[name] = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, _handing_out(self, self._were[name]))

    def handed_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The script takes out all values of a tensor."""
        looks = self._looks and self._thread == threading.get_ident()
        if not looks or self._origin(_in_memory(tensor)) is None or is_ours(_TORCH):
            return tensor
        return self._read(tensor)

    def _origin(self, tensors: Iterable[torch.Tensor]) -> _Origin | None:
        found = (self._origins.get(_storage(tensor)) for tensor in tensors)
        return next((each for each in found if each is not None), None)

    def _depend(self, on: _Origin, tensors: Iterable[torch.Tensor]) -> None:
        new = {ref: tensor for tensor in tensors if (ref := _storage(tensor)) not in self._origins}
        place = line() if new else ""
        for ref, tensor in new.items():
            self._origins[ref] = _Origin(on.call, on.called, place, _is_elsewhere(tensor))
        if len(self._origins) > self._room:
            self._origins = {ref: each for ref, each in self._origins.items() if each.elsewhere or _has_memory(ref)}
            self._room = max(_ROOM, 2 * len(self._origins))

    def _forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """They were written anew. What lies beside a view was not."""
        for tensor in tensors:
            if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                self._origins.pop(_storage(tensor), None)

    def _of_the_same_sizes(self, result: Any) -> Any:
        """How many elements there are depends on values, and a script can see it."""
        tensors: list[torch.Tensor] = [result] if isinstance(result, torch.Tensor) else list(result)
        mine = torch.tensor([size for each in tensors for size in each.shape])
        at_first = self._read(mine).tolist()
        if at_first == mine.tolist():
            return result
        made = []
        for each in tensors:
            shape, at_first = at_first[: each.dim()], at_first[each.dim() :]
            made.append(each.new_zeros(shape))
        _spoil(made)
        return made[0] if isinstance(result, torch.Tensor) else tuple(made)


def _put_below(mode: TorchDispatchMode) -> None:
    """Under those that the script has entered: it leaves them by taking away the uppermost one."""
    _take_out(mode)
    above = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    for each in (mode, *reversed(above)):
        _push_mode(each)


def _take_out(mode: TorchDispatchMode) -> None:
    were = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    for each in reversed(were):
        if each is not mode:
            _push_mode(each)


def _spoil(tensors: Iterable[torch.Tensor]) -> None:
    for each in _in_memory(list(tensors)):
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
        return real(derived.handed_out(tensor), *args, **kwargs)

    return method


@functools.cache
def _form(func: Any) -> _Form:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _Form()  # of higher order: made of others
    namespace, _, name = schema.name.partition("::")
    written = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    unread = [each.name for each in written if each.is_out or name in _OVERWRITE]
    return _Form(
        name,
        namespace,
        tuple(each.name for each in schema.arguments),
        frozenset(each.name for each in written),
        frozenset(unread),
        torch.Tag.dynamic_output_shape in func.tags,
    )


def _sorted(form: _Form, args: Sequence[Any], named: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    read, written = list[torch.Tensor](), list[torch.Tensor]()
    names = itertools.chain(form.arguments, itertools.repeat(""))
    for name, value in (*zip(names, args, strict=False), *named.items()):
        tensors = list(_in_memory(value))
        read += [] if name in form.unread else tensors
        written += tensors if name in form.written else []
    return read, written


def _in_memory(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own in an argument or result."""
    if isinstance(value, torch.Tensor):
        inner: Any = value
        if is_traceable_wrapper_subclass(inner):  # a DTensor, and others that stand for tensors
            for name in inner.__tensor_flatten__()[0]:
                yield from _in_memory(getattr(inner, name))
        elif value.layout is torch.strided:
            yield value
        elif value.layout is torch.sparse_coo:
            yield value._values()
        elif value.layout in _SPARSE:
            yield value.values()
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _in_memory(each)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return not tensor.untyped_storage().resizable()


def _has_memory(ref: StorageWeakRef) -> bool:
    """Some leave a tensor, and take its memory away."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return storage is not None and storage.nbytes() > 0
