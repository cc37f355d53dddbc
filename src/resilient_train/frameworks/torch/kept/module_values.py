"""Plain values in the attributes of a model's modules: a temperature, a count of forward passes, a dropout's rate.

They are in no ``state_dict()``. A forward pass may change them, or the loop: a redo finds them as the window did. A new
process has what its script's constructors give; what was set since, once or in each step, it takes over from another
one.

Of a module that has changed anything else too (a tensor that is no buffer, a function, a list), nothing is taken over:
a flag that says that something was made is of no use without it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from resilient_train import script_place
from resilient_train.frameworks.torch.kept.module_entries import ModuleEntries
from resilient_train.frameworks.torch.tensors.extra_state import publishes
from resilient_train.odd_text import is_text

Plain = bool | int | float | str | None
_HELD = frozenset((bool, int, float, complex, str, bytes, type(None)))
_SENT = frozenset((bool, int, float, str, type(None)))
_INTS = range(-(1 << 63), 1 << 64)
"""What a message takes."""
_OF_ANY = frozenset(vars(torch.nn.Module()))
"""Kept elsewhere (``training``), or torch's own business."""


class _Missing:
    """Nothing."""


_MISSING = _Missing()
_COME_OR_GONE = _HELD | {_Missing}

Key = tuple[int, str]
"""A module: the number of its model, its name there."""


class ValuesOf(msgspec.Struct, array_like=True, frozen=True):
    """For another process: what a module has otherwise than as it was built."""

    module: Key
    values: dict[str, Plain]
    gone: tuple[str, ...] = ()
    """Plain attributes that its constructor gives, and that were deleted since."""


class _Attributes(NamedTuple):
    """Of one module: its own dictionary and what was in it, the names of the plain ones, and those of others."""

    module: torch.nn.Module
    own: dict[str, Any]
    size: int
    known: frozenset[str]
    names: tuple[str, ...]
    others: tuple[str, ...]


class HeldValues(NamedTuple):
    """The plain values of some modules, one behind the other, and where they were read."""

    read: list[_Attributes]
    values: list[Any]

    def each(self) -> Iterator[tuple[_Attributes, dict[str, Any]]]:
        """Of each module: its values by their names."""
        values = iter(self.values)
        for each in self.read:
            yield each, dict(zip(each.names, values, strict=False))


class _Built(NamedTuple):
    module: torch.nn.Module
    parts: _Parts


class ModuleValues:
    """Of ``modules``. ``before``: of before some of them were changed for others."""

    def __init__(self, modules: Sequence[tuple[Key, torch.nn.Module]] = (), before: ModuleValues | None = None) -> None:
        self._modules = [(key, module) for key, module in modules if not _is_wrapper(module)]
        self._read: list[_Attributes] = []
        self._dicts: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        """Of each module: its own dictionary, and how much was in it."""
        self._entries: ModuleEntries[Any] = ModuleEntries(())
        self._others: ModuleEntries[Any] = ModuleEntries(())
        self._last = HeldValues([], [])
        self._look()
        self._built: dict[Key, _Built] = {} if before is None else before._built
        if not self._built:
            self._built = {key: _Built(module, _parted(module)) for key, module in self._modules}

    def _look(self) -> None:
        self._read = [_attributes_of(module) for _, module in self._modules]
        self._dicts = [each.own for each in self._read]
        self._sizes = [each.size for each in self._read]
        self._entries = ModuleEntries(((each.own, name) for each in self._read for name in each.names), _MISSING)
        self._others = ModuleEntries(((each.own, name) for each in self._read for name in each.others), _MISSING)
        self._last = HeldValues(self._read, self._entries.now())

    def held(self) -> HeldValues:
        """Nearly always the same as the last time."""
        if [*map(len, self._dicts)] != self._sizes or self._has_other_kinds():
            self._look()
        elif not self._entries.are(self._last.values):
            values = self._entries.now()
            if any(each is _MISSING for each in values):  # one has gone, and another one has come
                self._look()
            else:
                self._last = HeldValues(self._read, values)
        return self._last

    def _has_other_kinds(self) -> bool:
        """Whether one that was no plain value is one now (``self.scale = float(self.scale)``), or has gone."""
        return not _COME_OR_GONE.isdisjoint(map(type, self._others.now()))

    def put_back(self, held: HeldValues) -> None:
        """What ``held`` was last, behind a body that may have been cut."""
        for (module, own, size, known, *_), values in held.each():
            if len(own) != size:
                for name in _parted(module).plain.keys() - known:
                    del own[name]
            own.update(values)

    def told(self, held: HeldValues) -> tuple[ValuesOf, ...]:
        """What another process is to take over: of what was ``held``."""
        of_window = {id(each.own): values for each, values in held.each()}
        found = []
        for key, module, parts in self._parted():
            now = of_window.get(id(vars(module)), parts.plain)
            changed, gone = self._changed(key, now), self._gone(key, now)
            if changed is not None and (changed or gone):
                found.append(ValuesOf(key, changed, gone))
        return tuple(found)

    def _changed(self, key: Key, now: dict[str, Any]) -> dict[str, Any] | None:
        """What is not as it was built. None: another process can't be told."""
        changed = self._otherwise(key, now)
        return changed if all(map(_can_be_sent, changed.values())) else None

    def _otherwise(self, key: Key, now: dict[str, Any]) -> dict[str, Any]:
        return {name: now[name] for name in _unlike(now, self._built[key].parts.plain) if name in now}

    def _gone(self, key: Key, now: dict[str, Any]) -> tuple[str, ...]:
        return tuple(name for name in self._built[key].parts.plain if name not in now)

    def changed(self) -> list[tuple[Key, str, Plain]]:
        """The same, one by one, but for modules that publish what is their rank's own."""
        modules = dict(self._modules)
        told = [each for each in self.told(self.held()) if not publishes(modules[each.module])]
        return [(each.module, name, value) for each in told for name, value in each.values.items()]

    def kept_back(self) -> list[tuple[Key, str, Any]]:
        """What is not as it was built in modules of which another process takes nothing over, one by one."""
        found: list[tuple[Key, str, Any]] = []
        for key, module in self._modules:
            built = self._built.get(key)
            if built is None or built.module is not module or publishes(module):
                continue
            parts = _parted(module)
            if built.parts.others != parts.others or self._changed(key, parts.plain) is None:
                found += ((key, name, value) for name, value in self._otherwise(key, parts.plain).items())
        return found

    def exchanged(self) -> list[tuple[Key, str]]:
        """Where another module stands than was built, or none, or one more: its class and plain values (of a library's
        alone: others may count). Not where it is like the first.
        """
        modules, found = dict(self._modules), []
        for key in self._built | modules:
            built, module = self._built.get(key), modules.get(key)
            if built is not None and built.module is module:
                continue
            here, was = _looks_of(module, None), _looks_of(built and built.module, built and built.parts)
            if here != was:
                found.append((key, here))
        return found

    def take(self, told: Sequence[ValuesOf]) -> None:
        """Those of another process, which has built the same models. What a module publishes is its rank's own."""
        modules = dict(self._modules)
        for each in told:
            module = modules.get(each.module)
            if module is None:  # a rank may have one more, to write a log
                continue
            published = module.get_extra_state() if publishes(module) else None
            vars(module).update(each.values)
            for name in each.gone:
                vars(module).pop(name, None)
            if publishes(module):
                module.set_extra_state(published)

    def settled(self) -> list[tuple[object, frozenset[str]]]:
        """The modules of which another process can take over what they are, and the attributes that it takes over, or
        that they publish.
        """
        told = ((module, parts) for key, module, parts in self._parted() if self._changed(key, parts.plain) is not None)
        return [(module, parts.given.union(parts.plain)) for module, parts in told]

    def _parted(self) -> Iterator[tuple[Key, torch.nn.Module, _Parts]]:
        """The modules that have changed nothing else."""
        for key, module in self._modules:
            built, parts = self._built.get(key), _parted(module)
            if built is not None and built.module is module and built.parts.others == parts.others:
                yield key, module, parts


def _attributes_of(module: torch.nn.Module) -> _Attributes:
    own, parts = vars(module), _parted(module)
    return _Attributes(module, own, len(own), frozenset(own), tuple(parts.plain), (*parts.others, *parts.given))


class _Parts(NamedTuple):
    """Of a module: its plain attributes, those that it publishes, and where each of the others lies."""

    plain: dict[str, Any]
    given: frozenset[str]
    others: dict[str, int]


def _parted(module: torch.nn.Module) -> _Parts:
    """Private ones of a library's class are that library's business."""
    private = _kind_of(module).no_library
    counted = {name: value for name, value in vars(module).items() if private or not name.startswith("_")}
    plain = {name: value for name, value in counted.items() if name not in _OF_ANY and type(value) in _HELD}
    others = {name: value for name, value in counted.items() if name not in _OF_ANY and name not in plain}
    given = _given_of(module, others) if others and publishes(module) else frozenset[str]()
    return _Parts(plain, given, {name: id(value) for name, value in others.items() if name not in given})


def _given_of(module: torch.nn.Module, attributes: Mapping[str, Any]) -> frozenset[str]:
    """Those of which it gives the value, or a copy, in ``get_extra_state()``: in a container, or alone."""
    given = module.get_extra_state()
    if isinstance(given, Mapping):
        names, values = set(given), list(given.values())
    else:
        names, values = set(), list(given) if isinstance(given, (tuple, list)) else [given]
    return frozenset(
        name for name, value in attributes.items() if name in names or any(_is_copy(each, value) for each in values)
    )


def _is_copy(one: Any, other: Any) -> bool:
    if one is other:
        return True
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(one, other)


def unlike(one: Sequence[ValuesOf], other: Sequence[ValuesOf]) -> list[tuple[Key, str]]:
    """The values that two processes have told of, and have not alike."""
    ones, others = (
        {each.module: {**each.values, **dict.fromkeys(each.gone, _MISSING)} for each in told} for told in (one, other)
    )
    return [(key, name) for key in ones | others for name in _unlike(ones.get(key, {}), others.get(key, {}))]


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one | other if not _is_same(one.get(name, _MISSING), other.get(name, _MISSING))]


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))  # noqa: PLR0124 - NaN


def _looks_of(module: torch.nn.Module | None, parts: _Parts | None) -> str:
    if module is None:
        return "none"
    plain = {} if _kind_of(module).no_library else (parts or _parted(module)).plain
    return f"{type(module).__module__}.{type(module).__qualname__} {sorted(plain.items())}"


def _can_be_sent(value: Any) -> bool:
    if type(value) is str:
        return is_text(value)
    return type(value) in _SENT and (type(value) is not int or value in _INTS)


class _Kind(NamedTuple):
    """Of modules of one class: whether it is of somebody else's than torch's, and of no library's."""

    users: bool
    no_library: bool


_kinds: weakref.WeakKeyDictionary[type, _Kind] = weakref.WeakKeyDictionary()


def _kind_of(module: torch.nn.Module) -> _Kind:
    kind = type(module)
    if kind not in _kinds:
        others = [each for each in kind.__mro__ if _is_anothers(each)]
        files = [getattr(sys.modules.get(each.__module__), "__file__", None) or "" for each in others]
        _kinds[kind] = _Kind(bool(others), bool(others) and all(map(script_place.is_users, files)))
    return _kinds[kind]


def _is_anothers(kind: type) -> bool:
    """Neither torch's nor Python's (``Generic``)."""
    return kind.__module__.partition(".")[0] not in ("torch", "typing", "abc", "builtins")


def _is_wrapper(module: torch.nn.Module) -> bool:
    """Of torch's (DDP, a compiled one): what it counts, and has made, is of its process."""
    of_torch = (each for each in type(module).__mro__ if each.__module__.startswith("torch.nn.modules."))
    return not _kind_of(module).users and all(each is torch.nn.Module for each in of_torch)
