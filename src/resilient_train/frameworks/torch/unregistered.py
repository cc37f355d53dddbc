"""Parameters that exist when the loop begins, and are not registered: of a teacher, an EMA, a reference model.

Nobody brings these back. A process that takes a rank's place has what its script has made, as it was when the loop
began, and so two things have to be true of them: they are the same each time the script runs, which that process
looks at; and they don't change in training, which its replica tells. A few words of each are compared.

Tensors outside of modules are not looked at: batches, sums of losses and caches change as they please.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
import xxhash

from resilient_train.frameworks.torch.leaves import is_sharded, local
from resilient_train.frameworks.torch.storages import Memory, holds, memory_of

_ELEMENTS = 256
"""So many at both ends of a parameter. An update changes nearly all, and other seeds give others everywhere."""
_EACH = 32
"""So many looks between two that count, behind the first ones."""
_PLAIN = (torch.nn.Parameter, torch.Tensor)


class Strange(msgspec.Struct, array_like=True, frozen=True, order=True):
    """A parameter. ``kind``: the class of the outermost module that it is in, and ``name`` its name there."""

    kind: str
    name: str
    form: str
    digest: int

    @property
    def key(self) -> tuple[str, str, str]:
        """Without its values."""
        return self.kind, self.name, self.form

    @property
    def told(self) -> str:
        """For people."""
        return f"{self.name!r} of {self.kind}"


class _Held(NamedTuple):
    strange: Strange
    parameter: weakref.ref[torch.Tensor]

    def is_other(self) -> bool:
        """Not so if it is gone, or has been made into one of another type."""
        parameter = self.parameter()
        if parameter is None or not _can_be_looked_at(parameter) or _form(parameter) != self.strange.form:
            return False
        return _digest(parameter) != self.strange.digest


class Unregistered:
    """Those of this process. There are none until ``begin`` is called. ``models`` are registered."""

    def __init__(self, models: Sequence[torch.nn.Module] = ()) -> None:
        self._models = models
        self._held: list[_Held] = []
        self._changed = ""
        self._looks = 0
        self.sharded: list[str] = []
        """Those that are divided among ranks, for people."""

    def begin(self, registered: Callable[[], Memory]) -> None:
        """The loop begins. ``registered``: the memory of what comes from a replica, asked for if that is needed: it has
        the user's ``state_dict()``s called.
        """
        known = {id(parameter) for model in self._models for parameter in model.parameters()}
        others = [(kind, name, each) for kind, name, each in _parameters() if id(each) not in known]
        memory = registered() if others else frozenset()
        found = [(kind, name, each) for kind, name, each in others if not holds(memory, memory_of([each]))]
        self._held = [
            _Held(Strange(kind, name, _form(each), _digest(each)), weakref.ref(each)) for kind, name, each in found
        ]
        self.sharded = [f"{name!r} of {kind}" for kind, name, each in found if is_sharded(each)]

    def packed(self) -> bytes:
        """For ``difference``, in another process."""
        return msgspec.msgpack.encode([each.strange for each in self._held])

    def difference(self, packed: bytes) -> str:
        """One that has other values than that of the predecessor, who has ``packed`` its own; for people, empty if none
        has. One that only one of both has counts for nothing: it may be garbage that the other has collected.
        """
        mine = {each.strange for each in self._held}
        theirs = set(msgspec.msgpack.decode(packed, type=list[Strange])) if packed else mine
        other_here = {each.key for each in mine - theirs}
        other = min((each for each in theirs - mine if each.key in other_here), default=None)
        return "" if other is None else f"parameter {other.told}, which is not registered, has other values"

    def changed(self, *, sometimes: bool = False) -> str:
        """One that is not any more what it was, for people; empty if none is. ``sometimes``: look at the 1st, 2nd,
        4th, 8th, ... and each 32nd call only, since a look at a device's memory waits for the device.
        """
        self._looks += sometimes
        if self._held and not self._changed and not (sometimes and _is_between(self._looks)):
            found = next((each.strange for each in self._held if each.is_other()), None)
            self._changed = (
                "" if found is None else f"parameter {found.told}, which is not registered, has changed in training"
            )
        return self._changed


def _is_between(count: int) -> bool:
    return bool(count & (count - 1)) and bool(count % _EACH)


def _parameters() -> Iterator[tuple[str, str, torch.Tensor]]:
    """Those of all modules, by the outermost one. What an import has made before the process was forked is not found:
    to list it takes 0.1 s.
    """
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module) and _is_built(each)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    seen = set[int]()
    for module in modules:
        if id(module) in inner:
            continue
        for name, parameter in torch.nn.Module.named_parameters(module):  # not what a class has made of it
            if id(parameter) not in seen and _can_be_looked_at(parameter):
                seen.add(id(parameter))
                yield type(module).__qualname__, name, parameter


def _is_built(module: torch.nn.Module) -> bool:
    """``__init__`` was called."""
    return {"_modules", "_parameters"} <= vars(module).keys()


def _can_be_looked_at(parameter: torch.Tensor) -> bool:
    if type(parameter) not in _PLAIN and not is_sharded(parameter):
        return False
    held = local(parameter)
    if type(held) not in _PLAIN or held.layout is not torch.strided or held.is_meta or not held.numel():
        return False
    # FSDP takes the memory of whole ones away, and leaves the tensors.
    last = sum((size - 1) * stride for size, stride in zip(held.shape, held.stride(), strict=True))
    return (held.storage_offset() + last + 1) * held.element_size() <= held.untyped_storage().nbytes()


def _form(parameter: torch.Tensor) -> str:
    return f"{parameter.dtype} {tuple(parameter.shape)}"


def _digest(parameter: torch.Tensor) -> int:
    flat = local(parameter).flatten()
    ends = torch.cat([flat[:_ELEMENTS], flat[-_ELEMENTS:]]).to("cpu")
    return xxhash.xxh3_64_intdigest(ends.view(torch.uint8).numpy().data)
