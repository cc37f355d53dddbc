"""What exists when the loop begins, is not registered, and may train with it: parameters (of a teacher, an EMA, a
reference model), and what counts the updates (a scheduler).

Nobody brings these back. A process that takes a rank's place has what its script has made, as it was when the loop
began, and so two things have to be true of them: they are the same each time the script runs, which that process
looks at; and they don't change in training, which its predecessor tells, or its replica. A few words of each are
compared. What counts is made anew by each script, so of it only the second is asked.

Buffers that are saved with a module are looked at like parameters. Tensors outside of modules are not looked at:
batches, sums of losses and caches change as they please.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from resilient_train.frameworks.torch.tensors.leaves import is_sharded, local
from resilient_train.frameworks.torch.tensors.storages import Memory, holds, memory_of
from resilient_train.frameworks.torch.watching.listed_objects import instances_of

_ELEMENTS = 256
"""So many at both ends of a parameter. An update changes nearly all, and other seeds give others everywhere."""
_EACH = 32
"""So many looks between two that count, behind the first ones."""
_DIVIDED = "part of "
_AVERAGERS = "torch.distributed.algorithms.model_averaging.averagers"
_REACHED_MAX = 100_000
"""Objects that are followed to find out what a registered one has in it. A data set may be one."""


_NOT_FOLLOWED = (type, ModuleType, torch.nn.Module, torch.Tensor, torch.optim.Optimizer)


class Strange(msgspec.Struct, array_like=True, frozen=True, order=True):
    """``what``: a parameter, or a buffer. ``kind``: the class of the outermost module that it is in, and ``name`` its
    name there.
    """

    what: str
    kind: str
    name: str
    form: str
    digest: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Without its values."""
        return self.what, self.kind, self.name, self.form

    @property
    def told(self) -> str:
        """For people."""
        return f"{self.what} {self.name!r} of {self.kind}"


class _Held(NamedTuple):
    """One of them by its place: what stands there may be another one later. And torch does not let a tensor be swapped
    that somebody has a weak reference to.
    """

    strange: Strange
    module: weakref.ref[torch.nn.Module]
    name: str

    def is_other(self) -> bool:
        """Not so if its module is gone, or has put the whole of it in the place of a part, as FSDP does for a while."""
        module = self.module()
        if module is None:
            return False
        found: torch.Tensor | None = module._parameters.get(self.name)
        if found is None:
            found = module._buffers.get(self.name)
        if found is None:
            return True
        if not _can_be_looked_at(found):
            return False
        form = _form(found)
        if form != self.strange.form:
            return is_sharded(found) == self.strange.form.startswith(_DIVIDED)
        return _digest(found) != self.strange.digest


class _Counting(NamedTuple):
    """A scheduler of registered parameters, or what averages models every so many steps; and what its counts were."""

    told: str
    held: weakref.ref[Any]
    begun: dict[str, int]

    def is_other(self) -> bool:
        """Not so if it is gone."""
        held = self.held()
        return held is not None and _counts(held) != self.begun


class Unregistered:
    """Those of this process. There are none until ``begin`` is called. ``models`` are registered, and so are
    ``others``: schedulers, and objects of the user's that publish their state.
    """

    def __init__(self, models: Sequence[torch.nn.Module] = (), others: Sequence[Any] = ()) -> None:
        self._models = models
        self._others = others
        self._held: list[_Held] = []
        self._counting: list[_Counting] = []
        self._changed: tuple[str, ...] = ()
        self._counted: tuple[str, ...] = ()
        self._looks = 0

    def begin(self, registered: Callable[[], Memory]) -> None:
        """The loop begins. ``registered``: the memory of what comes from a replica, asked for if that is needed: it has
        the user's ``state_dict()``s called.
        """
        self._held, self._counting = self._found(registered)

    def go_on(self, registered: Callable[[], Memory]) -> None:
        """A loop that gives its bodies to the Session comes to the first one: it may have made more since it began."""
        held, counting = self._found(registered)
        known = {(id(each.module()), each.name) for each in self._held}
        self._held += [each for each in held if (id(each.module()), each.name) not in known]
        counted = {id(each.held()) for each in self._counting}
        self._counting += [each for each in counting if id(each.held()) not in counted]

    def _found(self, registered: Callable[[], Memory]) -> tuple[list[_Held], list[_Counting]]:
        known = {id(each) for model in self._models for each in (*model.parameters(), *model.buffers())}
        listed = instances_of(torch.nn.Module, *_kinds_that_count())
        modules = [each for each in listed if issubclass(type(each), torch.nn.Module)]
        counting = [each for each in listed if not issubclass(type(each), torch.nn.Module) and _may_count(each, known)]
        reached = _reached_from(self._others) if counting else set[int]()
        counts = [
            _Counting(_named(each), weakref.ref(each), _counts(each)) for each in counting if id(each) not in reached
        ]
        others = [each for each in _tensors(modules) if id(each.tensor) not in known]
        memory = registered() if others else frozenset()
        found = [each for each in others if not holds(memory, memory_of([each.tensor]))]
        return [_Held(each.strange, weakref.ref(each.module), each.name) for each in found], counts

    def packed(self) -> bytes:
        """For ``difference``, in another process."""
        return msgspec.msgpack.encode([each.strange for each in self._held])

    def difference(self, packed: bytes) -> str:
        """One that has other values than that of the predecessor, who has ``packed`` its own; for people, empty if none
        has. One that only one of both has counts for nothing: it may be garbage that the other has collected.
        """
        mine = {each.strange for each in self._held if each.module() is not None}
        theirs = set(msgspec.msgpack.decode(packed, type=list[Strange])) if packed else mine
        other_here = {each.key for each in mine - theirs}
        other = min((each for each in theirs - mine if each.key in other_here), default=None)
        return "" if other is None else f"{other.told}, which is not registered, has other values"

    def changed(self, *, sometimes: bool = False) -> tuple[str, ...]:
        """Those that are not any more what they were, for people. ``sometimes``: look at the 1st, 2nd, 4th, 8th, ...
        and each 32nd call only, since a look at a device's memory waits for the device. What counts is always asked.
        """
        self._looks += sometimes
        if self._held and not (sometimes and _is_between(self._looks)):
            found = (each.strange.told for each in self._held if each.strange.told in self._changed or each.is_other())
            self._changed = tuple(dict.fromkeys(found))
        for each in self._counting:
            if each.told not in self._counted and each.is_other():
                self._counted += (each.told,)
        return self._changed + self._counted

    def stands_here(self, told: str) -> bool:
        """Whether this process has one of that name."""
        return told in (each.strange.told for each in self._held) or told in (each.told for each in self._counting)


def _is_between(count: int) -> bool:
    return bool(count & (count - 1)) and bool(count % _EACH)


class _Found(NamedTuple):
    kind: str
    full_name: str
    module: torch.nn.Module
    name: str
    tensor: torch.Tensor

    @property
    def strange(self) -> Strange:
        what = "parameter" if self.name in self.module._parameters else "buffer"
        return Strange(what, self.kind, self.full_name, _form(self.tensor), _digest(self.tensor))


def _tensors(modules: Iterable[torch.nn.Module]) -> Iterator[_Found]:
    """The state of all modules, by the outermost one. What an import has made before the process was forked is not
    found (``listed``).
    """
    modules = [each for each in modules if _is_built(each)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    seen = set[int]()
    for outer in modules:
        if id(outer) in inner:
            continue
        for prefix, module in torch.nn.Module.named_modules(outer):  # not what a class has made of it
            for name, tensor in _state_of(module):
                if id(tensor) not in seen and _can_be_looked_at(tensor):
                    seen.add(id(tensor))
                    full = f"{prefix}.{name}" if prefix else name
                    yield _Found(type(outer).__qualname__, full, module, name, tensor)


def _state_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Its parameters, and the buffers that it would save: others are caches."""
    kept = {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
    yield from ((name, each) for name, each in (*module._parameters.items(), *kept.items()) if each is not None)


def _is_built(module: torch.nn.Module) -> bool:
    """``__init__`` was called."""
    return {"_modules", "_parameters"} <= vars(module).keys()


def _can_be_looked_at(tensor: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(tensor) or (not is_sharded(tensor) and not _is_plain(tensor)):
        return False
    held = _local(tensor)
    if not _is_plain(held) or held.layout is not torch.strided or held.is_meta or not held.numel():
        return False
    # FSDP takes the memory of whole ones away, and leaves the tensors.
    last = sum((size - 1) * stride for size, stride in zip(held.shape, held.stride(), strict=True))
    return (held.storage_offset() + last + 1) * held.element_size() <= held.untyped_storage().nbytes()


def _is_plain(tensor: torch.Tensor) -> bool:
    """It has memory of its own, and its class does not stand for something else."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).as_subclass(torch.Tensor)


def _form(tensor: torch.Tensor) -> str:
    divided = f"{_DIVIDED}{tuple(_local(tensor).shape)}, " if is_sharded(tensor) else ""
    return f"{divided}{tensor.dtype} {tuple(tensor.shape)}"


def _digest(tensor: torch.Tensor) -> int:
    flat = _local(tensor).flatten()
    ends = torch.cat([flat[:_ELEMENTS], flat[-_ELEMENTS:]]).to("cpu")
    return xxhash.xxh3_64_intdigest(ends.view(torch.uint8).numpy().data)


def _kinds_that_count() -> list[type]:
    averagers = sys.modules.get(_AVERAGERS)
    return [torch.optim.lr_scheduler.LRScheduler] + ([averagers.ModelAverager] if averagers is not None else [])


def _may_count(counting: Any, known: set[int]) -> bool:
    """A scheduler may be another network's, which is not registered either: its parameters tell."""
    if not issubclass(type(counting), torch.optim.lr_scheduler.LRScheduler):
        return True
    optimizer = vars(counting).get("optimizer")
    if not issubclass(type(optimizer), torch.optim.Optimizer):
        return False
    groups = vars(optimizer).get("param_groups", [])
    return any(id(parameter) in known for group in groups for parameter in group["params"])


def _named(counting: Any) -> str:
    is_scheduler = issubclass(type(counting), torch.optim.lr_scheduler.LRScheduler)
    return f"{'scheduler' if is_scheduler else 'averager'} {type(counting).__qualname__}"


def _counts(counting: Any) -> dict[str, int]:
    return {name: each for name, each in vars(counting).items() if type(each) is int}


def _reached_from(registered: Iterable[Any]) -> set[int]:
    """What registered objects have in them, by id: a scheduler of schedulers, a trainer's own that publishes for all it
    holds. No object is asked.
    """
    ahead = deque(registered)
    for each in registered:
        published = getattr(type(each), "state_dict", None)
        if isinstance(published, FunctionType):
            names = inspect.getclosurevars(published)
            ahead += [*names.nonlocals.values(), *names.globals.values()]
    found, kept = set[int](), list[Any]()
    while ahead and len(found) < _REACHED_MAX:
        each = ahead.popleft()
        if id(each) in found or not gc.is_tracked(each) or issubclass(type(each), _NOT_FOLLOWED):
            continue
        found.add(id(each))
        kept.append(each)  # so that no other one gets its id
        if type(each) is FunctionType:
            ahead += (*(each.__closure__ or ()), each.__dict__)  # not the names of its module
        else:
            ahead += gc.get_referents(each)
    return found
