"""The buffers of the models that have changed: those count as a rank's own. So do small ones that nobody makes equal,
from the start on: a script may have built other ones on each rank (its positions, its site's mean).

A script may put another tensor in the place of one, of another shape too (a bank of features that grows), take it
away, or have a forward pass make it. All of that is put back: first which tensor stood there, and which memory that
had, and then what was in it. Which memory another one has that a script has put there nobody knows: it may be a row of
a table, or the batch. So nothing is written into it, and a process that takes the place gets one of its own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from resilient_train._native import Glance, columns
from resilient_train.errors import ProtocolError
from resilient_train.frameworks.torch.kept.module_entries import ModuleEntries
from resilient_train.frameworks.torch.tensors.leaves import dense, is_plainly_dense, is_sharded
from resilient_train.state.transfer import Span

_ADDRESS = torch.Tensor.data_ptr
_IS_NONE = functools.partial(operator.is_, None)
_Places = dict[str, tuple[dict[str, torch.Tensor | None], str]]
# Their kernels write the running statistics without telling the version counter.
_SILENT_WRITERS = (torch.nn.modules.batchnorm._NormBase,)


_SMALL_BYTES = 256 << 10
"""Of all that are looked at in each step: some 10 us."""
_CLAIMED_BYTES = 64 << 10
"""Of all that are published with each update though they don't change."""


def lies_here(buffer: torch.Tensor) -> bool:
    """Whether its bytes lie in one piece in this process's memory."""
    return buffer.device.type == "cpu" and is_plainly_dense(buffer) and buffer.numel() > 0


def _have_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or (one.dtype, one.device) != (other.dtype, other.device):
        return one.layout is other.layout is not torch.strided
    return one.is_set_to(other)


def _put(held: dict[str, torch.Tensor | None], name: str, there: _There) -> None:
    if held.get(name) is not there.buffer:
        held[name] = there.buffer
    if not _have_same_memory(there.buffer, there.memory):
        there.buffer.data = there.memory


def _put_in_order(held: dict[str, torch.Tensor | None], order: Sequence[str]) -> None:
    """Where any of these stand. Others stay where they are."""
    names = {name for name in order if name in held}
    following = [name for name in order if name in names]
    if [name for name in held if name in names] != following:
        each = iter(following)
        were = {name: held[name] for name in [next(each) if name in names else name for name in held]}
        held.clear()
        held.update(were)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are the same; not so 0.0 and -0.0, which are equal."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    first, second = (
        each.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for each in (one, other.to(one.device))
    )
    return torch.equal(first, second)


def write(here: torch.Tensor, value: torch.Tensor) -> bool:
    """Nothing, where it is so already: others may have that memory too. False: it does not fit, or lies in its own way
    (``expand``).
    """
    if (here.shape, here.dtype) != (value.shape, value.dtype):
        return False
    if same_bits(here, value):
        return True
    if any(size > 1 and not stride for size, stride in zip(here.shape, here.stride(), strict=True)):
        return False
    with torch.no_grad():
        here.copy_(value)
    return True


def _may_be_read(buffer: torch.Tensor) -> bool:
    strided = buffer.layout is torch.strided and not is_sharded(buffer)
    return strided and buffer.device.type == "cpu" and buffer.numel() > 0 and buffer.data_ptr() != 0


def _extent(buffer: torch.Tensor) -> Span:
    """From its first byte to its last, with what lies in between: others may write that."""
    last = sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return Span(buffer.data_ptr(), (last + 1) * buffer.element_size())


class _There(NamedTuple):
    """One as it was found. ``memory`` is what it had then, whatever it is given later."""

    buffer: torch.Tensor
    memory: torch.Tensor
    address: int

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _There:
        return cls(buffer, buffer.detach(), buffer.data_ptr())

    def stands(self, buffer: torch.Tensor | None) -> bool:
        """Whether it is this one, where it was. Once a step for each."""
        return buffer is self.buffer and buffer.data_ptr() == self.address


class _Quiet(NamedTuple):
    """One that has not changed. It is held, so that no other one comes to lie where it does."""

    there: _There
    version: int
    address: int

    @property
    def buffer(self) -> torch.Tensor:
        return self.there.buffer

    def stands(self, buffer: torch.Tensor) -> bool:
        """Whether it is this one, where it was, and can be looked at."""
        plain = type(buffer) is torch.Tensor and not buffer.is_meta and not buffer.is_quantized
        return plain and buffer is self.buffer and buffer.data_ptr() == self.address

    def is_still(self, buffer: torch.Tensor | None) -> bool:
        return buffer is self.buffer and self.buffer._version == self.version and self.buffer.data_ptr() == self.address


class _Known:
    """Which are quiet, which are the rank's own, and what is looked at of each: until one changes sides."""

    def __init__(self, quiet: Mapping[str, _Quiet], live: Iterable[str], small: Iterable[str], places: _Places) -> None:
        self.live = sorted(live)
        self.live_there = ModuleEntries(places[key] for key in self.live)
        self._quiet = ModuleEntries(places[key] for key in quiet)
        self._buffers = [each.buffer for each in quiet.values()]
        self._versions = [each.version for each in quiet.values()]
        self._addresses = [each.address for each in quiet.values()]
        self.small = {key: quiet[key].buffer for key in small if key in quiet}

    def is_quiet(self) -> bool:
        """Whether all that were are, as ``_Quiet.is_still`` says of each."""
        return self._quiet.are(self._buffers) and (
            columns(self._buffers, ("_version", _ADDRESS)) == [self._versions, self._addresses]
        )


def _made_equal(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for wrapper in model.modules():
        # It makes none equal, also of those that came later, where there was none when it was made.
        if isinstance(wrapper, DistributedDataParallel) and wrapper.broadcast_buffers and wrapper.modules_buffers:
            ignored = wrapper.parameters_to_ignore
            yield from (each for name, each in wrapper.module.named_buffers() if name not in ignored)


def key_of(model: int, name: str) -> str:
    """Of a buffer by its model's number and its whole name there."""
    prefix, _, last = name.rpartition(".")
    return f"{model}.{prefix}.{last}"


class Buffers:
    """``changed`` finds new ones by version and address. A key is the model's number, the module's name, its own."""

    def __init__(self, models: tuple[torch.nn.Module, ...]) -> None:
        self._modules = {
            f"{index}.{name}": module for index, model in enumerate(models) for name, module in model.named_modules()
        }
        self._dicts = [module._buffers for module in self._modules.values()]
        self._places: _Places = {}
        self._devices: dict[str, torch.device] = {}
        """Of all that were ever there."""
        self._live: set[str] = set()
        self._quiet: dict[str, _Quiet] = {}
        self._first: dict[str, torch.Tensor] = {}
        self._there: dict[str, _There] = {}
        """Those that are not quiet, as the window found them."""
        self._gone: set[str] = set()
        """Those for which there was not even a name then."""
        self._order = [*map(tuple, self._dicts)]
        """In which each module had its names then. DDP sends them in that, and by that alone."""
        self._several_order: list[tuple[str, ...]] = []
        """Of those that have several, which are looked at in each window."""
        self._wanted: list[tuple[dict[str, torch.Tensor | None], list[str]]] = []
        """The order of another process, in which they are to be when all are there."""
        self._moved: set[str] = set()
        """Those that were seen to be another tensor than the script has built, or to have other memory."""
        self._claimed: dict[str, torch.Tensor] = {}
        """Quiet ones that are the rank's own all the same: copies in the host's memory; nobody waits for a device."""
        self._built: dict[str, _There] = {}
        """Those as the script has built them."""
        self._still: dict[str, torch.Tensor] | None = None
        """Which of the claimed are quiet; None: it is to be found anew."""
        self._known: _Known | None = None
        """None: likewise."""
        self._made: dict[str, bool] = {}
        """Those that the training has made, and whether there was a name for it, with None behind it."""
        for prefix, module in self._modules.items():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                key = f"{prefix}.{name}"
                self._places[key], self._devices[key] = (module._buffers, name), buffer.device
                if isinstance(module, _SILENT_WRITERS):
                    self._live.add(key)
                    self._there[key] = _There.of(buffer)
                else:
                    self._quiet[key] = _Quiet(_There.of(buffer), buffer._version, buffer.data_ptr())
                    self._first[key] = buffer.detach().clone()
        self._small = self._find_small()
        """Of the quiet ones those that are looked at in each window, from its begin on: so what a rollback finds has
        changed since then, and had its first value before. None is added later.
        """
        self._addresses: list[int] = []
        self._glance: Glance | None = None
        self._count()

    def _count(self) -> None:
        self._several = [held for held in self._dicts if len(held) > 1]
        self._names = sum(map(len, self._dicts))
        self._none = [(held, name) for held in self._dicts for name, buffer in held.items() if buffer is None]

    def claim(self, models: tuple[torch.nn.Module, ...]) -> None:
        """Those that DistributedDataParallel does not make equal may not be."""
        equal = {id(each) for model in models for each in _made_equal(model)}
        left = _CLAIMED_BYTES
        for key, quiet in sorted(self._quiet.items(), key=lambda each: each[1].buffer.nbytes):
            left -= quiet.buffer.nbytes
            if left >= 0 and id(quiet.buffer) not in equal and not quiet.buffer.is_meta:
                self._claimed[key], self._built[key] = dense(quiet.buffer).clone(), quiet.there

    def published(self, own: dict[str, torch.Tensor | None] | None = None) -> dict[str, torch.Tensor | None]:
        """As ``own``, which the caller may have just looked at, and those that were claimed."""
        if own is None:
            own = self.own()
        if self._still is None:
            self._still = {key: self._claimed[key] for key in sorted(self._claimed) if key in self._quiet}
        still = self._still
        return dict(sorted({**still, **own}.items())) if own and still else own or {**still}

    def keys(self) -> dict[int, str]:
        """Of all that are there, by id."""
        return {id(each): key for key in self._places if (each := self._present(key)) is not None}

    def is_as_built(self, key: str, value: torch.Tensor | None) -> bool:
        """As far as that is known."""
        return value is not None and key in self._claimed and same_bits(self._claimed[key], value)

    def changed(self) -> dict[str, torch.Tensor]:
        """The buffers that are this rank's own, by key; not copied. Not those that are only claimed."""
        return {key: buffer for key, buffer in self.own().items() if buffer is not None}

    def own(self) -> dict[str, torch.Tensor | None]:
        """The same, and None for those that are not there any more."""
        self._find_made()
        if not self._now_known().is_quiet():
            for key, quiet in list(self._quiet.items()):
                here = self._present(key)
                if quiet.is_still(here):
                    continue
                if here is not None and quiet.stands(here) and same_bits(here, self._first[key]):
                    # Nothing was written, or what was there: DDP's broadcast of several kinds of buffers raises the
                    # versions for a while, and lowers them again.
                    self._quiet[key], self._known = quiet._replace(version=here._version), None
                else:
                    self._wake(key)
        known = self._now_known()
        if not known.live:
            return {}
        found = known.live_there.now()
        if any(map(_IS_NONE, found)):  # one that has gone, and another that has come: there are as many
            self._find_made(anyway=True)
            known = self._now_known()
            found = known.live_there.now()
        return dict(zip(known.live, found, strict=True))

    def _now_known(self) -> _Known:
        if self._known is None:
            self._known = _Known(self._quiet, self._live, self._small, self._places)
        return self._known

    def _wake(self, key: str) -> None:
        self._there[key] = self._quiet.pop(key).there
        self._live.add(key)
        self._sides_changed()

    def _sides_changed(self) -> None:
        self._still = self._known = None

    def keep(self) -> dict[str, torch.Tensor | None]:
        """A window begins. They are looked at before. Returns ``own``."""
        own = self.own()
        for key, buffer in own.items():
            there = self._there.get(key)
            if there is not None and there.stands(buffer):
                continue
            if there is not None:
                self._moved.add(key)
            if buffer is None:
                self._there.pop(key, None)
            else:
                self._there[key] = _There.of(buffer)
        if self._made or self._gone or any(each is None for each in own.values()):
            self._gone = {key for key in self._live if self._places[key][1] not in self._places[key][0]}
            self._order = [*map(tuple, self._dicts)]
        elif (order := [*map(tuple, self._several)]) != self._several_order:  # one was taken away, and came again
            self._several_order, self._order = order, [*map(tuple, self._dicts)]
        return own

    def moved(self) -> list[str]:
        """Keys of those of which another process must not take what its script has built for them."""
        own = self.own()
        return sorted(self._moved | {key for key, each in self._there.items() if not each.stands(own.get(key))})

    def renew(self, strides: Mapping[str, tuple[int, ...]]) -> None:
        """Another process has those elsewhere: here they get memory of their own, laid out as there, to be filled."""
        for key, laid in strides.items():
            self._moved.add(key)
            held, name = self._place(key)
            if (here := held.get(name)) is not None:
                fits = len(laid) == here.dim()
                held[name] = here.new_empty_strided(here.shape, laid) if laid and fits else here.new_empty(here.shape)
                self._devices.setdefault(key, here.device)

    def to_be_ordered(self, names: Iterable[str]) -> None:
        """Another process has them in this order: keys, as ``key_of`` has it."""
        wanted: dict[str, list[str]] = {}
        for key in names:
            prefix, _, name = key.rpartition(".")
            wanted.setdefault(prefix, []).append(name)
        held = ((self._modules[prefix]._buffers, order) for prefix, order in wanted.items() if prefix in self._modules)
        self._wanted = [(names, order) for names, order in held if len(order) > 1]

    def _find_made(self, *, anyway: bool = False) -> None:
        """Nearly always there are as many as before."""
        same = not anyway and sum(map(len, self._dicts)) == self._names
        if same and not (self._none and any(held.get(name) is not None for held, name in self._none)):
            return
        empty = {(id(held), name) for held, name in self._none}
        for prefix, module in self._modules.items():
            for name, buffer in module._buffers.items():
                key = f"{prefix}.{name}"
                if buffer is not None and key not in self._devices:
                    self._places[key], self._devices[key] = (module._buffers, name), buffer.device
                    self._made[key] = (id(module._buffers), name) in empty
                    self._live.add(key)
                    self._sides_changed()
        self._count()

    def look(self, *, closely: bool) -> None:
        """Finds those that are written past the version counter (``buffer.data.mul_(...)``, running statistics and
        observers that a kernel of torch's writes), by comparing all. Else only if small ones on the host have changed:
        some begin to be written late (a layer is unfrozen, an observer is switched on).
        """
        for key in [*self._quiet] if closely else self._small_changed():
            buffer = self._present(key)
            if buffer is None or not same_bits(buffer, self._first[key]):
                self._wake(key)

    def _find_small(self) -> dict[str, torch.Tensor]:
        found, left = dict[str, torch.Tensor](), _SMALL_BYTES
        here = {key: quiet.buffer for key, quiet in self._quiet.items() if _may_be_read(quiet.buffer)}
        for key, buffer in sorted(here.items(), key=lambda named: _extent(named[1]).size):
            left -= _extent(buffer).size
            if left >= 0:
                found[key] = buffer
        return found

    def _small_changed(self) -> list[str]:
        """Keys of all of them if something has; also the first time, and when there are fewer."""
        small = self._now_known().small
        if not small:
            return []
        (addresses,) = columns([*small.values()], (_ADDRESS,))
        if self._glance is None or len(small) < len(self._small) or addresses != self._addresses:
            moved = [key for key, each in small.items() if each.data_ptr() != self._quiet[key].address]
            self._small, self._known = {key: each for key, each in small.items() if key not in moved}, None
            self._addresses = [each.data_ptr() for each in self._small.values()]
            self._glance = Glance([*map(_extent, self._small.values())])
        return [*self._small] if self._glance.changed() else []

    def _place(self, key: str) -> tuple[dict[str, torch.Tensor | None], str]:
        """Where a module has it, also one that another process's training has made."""
        if key not in self._places:
            prefix, _, name = key.rpartition(".")
            if prefix not in self._modules:
                raise ProtocolError(f"the state of another process has a buffer {key!r}, and no such module is here")
            self._places[key] = self._modules[prefix]._buffers, name
        return self._places[key]

    def _present(self, key: str) -> torch.Tensor | None:
        held, name = self._places[key]
        return held.get(name)

    def restore(self, values: Mapping[str, torch.Tensor | None], moved: Iterable[str] = ()) -> None:
        """Gives the buffers of those keys these values, which are nobody else's. In place where they fit, and are not
        among those that have ``moved``: DDP and captured graphs hold on to them. None: there was none.
        """
        self._moved |= {key for key in moved if key in values}
        for key, value in values.items():
            held, name = self._place(key)
            here = held.get(name)
            if value is not None and self.is_as_built(key, value):
                self._put_as_built(key, value)
                continue
            if value is None:
                if here is not None:
                    held[name] = None
            elif here is None or key in self._moved or not write(here, value):
                held[name] = value.to(self._devices.get(key, value.device))
            self._devices.setdefault(key, value.device if value is not None else torch.device("cpu"))
            self._live.add(key)
            self._quiet.pop(key, None)
            if (present := held.get(name)) is not None:
                self._there[key] = _There.of(present)
        for names, order in self._wanted:
            _put_in_order(names, order)
        self._wanted = []
        self._sides_changed()
        self._count()

    def _put_as_built(self, key: str, value: torch.Tensor) -> None:
        """A replica's state has come, with its own: it gets back what it had, and is as quiet as before."""
        held, name = self._place(key)
        there = self._built[key]
        _put(held, name, there)
        if write(there.memory, value):
            self._quiet[key] = _Quiet(there, there.buffer._version, there.address)
            self._live.discard(key)
            self._there.pop(key, None)
            self._moved.discard(key)

    def rollback(self, values: Mapping[str, torch.Tensor | None]) -> None:
        """Back to ``values``, and where the window found them. A buffer that changed for the first time since then goes
        back to its first value, and one that was made since then goes.
        """
        own = self.own()
        news = {key: first for key, first in self._first.items() if key in own and key not in values}
        for key in [key for key in self._made if key not in values]:
            self._unmake(key)
        for key, value in {**values, **news}.items():
            if key in self._quiet:
                continue  # claimed
            held, name = self._place(key)
            there = self._there.get(key)
            if value is None and key in self._gone:
                held.pop(name, None)
            elif value is None:
                held[name] = None
            elif there is None:
                held[name] = value.to(self._devices.get(key, value.device), copy=True)
            else:
                _put(held, name, there)
                if not write(there.memory, value):
                    held[name] = value.to(there.memory.device, copy=True)
        for names, order in zip(self._dicts, self._order, strict=True):
            if tuple(names) != order:  # one that was put back stands last
                _put_in_order(names, order)
        self._count()

    def _unmake(self, key: str) -> None:
        held, name = self._places.pop(key)
        if self._made.pop(key):
            held[name] = None
        else:
            held.pop(name, None)
            self._modules[key.rpartition(".")[0]]._non_persistent_buffers_set.discard(name)
        self._live.discard(key)
        self._there.pop(key, None)
        self._sides_changed()
        del self._devices[key]
