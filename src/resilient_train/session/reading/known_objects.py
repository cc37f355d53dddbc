"""What a Session knows of the objects that a loop has to do with."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import BuiltinMethodType, MethodDescriptorType
from typing import Any, NamedTuple

from resilient_train.frameworks.roles import Objects
from resilient_train.session.reading.names import split_name
from resilient_train.session.reading.static_lookup import (
    FUNCTIONS,
    MODULES,
    PROPERTIES,
    UNKNOWN,
    Texts,
    all_parts,
    arrays_in,
    attributes_of,
    can_change,
    counts_for_itself,
    functions_of,
    held,
    is_array,
    is_object,
    is_plain,
    isinstance_past,
    moves_when_used,
    reached_from,
)

_TENSORS = ("_parameters", "_buffers")
_OF_OTHERS = "resilient_settles"
"""A method of an integration's objects: what they carry of others, as ``Settled``."""
_CARRIED = "resilient_carries"
"""Likewise: objects that come back with it, as far as their ``state_dict()`` gives what they have."""
Settled = Iterable[tuple[object, Collection[str]]]
"""Parts of models, and of each the attributes that a redo and a new process get as they were."""


class KnownObjects:
    """What the Session carries, and what it leaves to the script. ``loaders``: what they reach is read each step."""

    def __init__(
        self, known: Iterable[object], models: Iterable[object], settled: Settled, loaders: Iterable[object] = ()
    ) -> None:
        known, settled = [*known], [*settled]
        # What a registered object holds is its own, also where the loop has another name for it.
        known += [part for each in known for part in attributes_of(each).values() if can_change(part)]
        # And what of an object comes back is its own, all of it.
        given = [each for part, names in settled for each in (held(part, name) for name in names)]
        known += [each for each in given if can_change(each) or is_object(each)]
        dicts = [each for each in given if isinstance_past(each, (dict,))]
        known += [value for each in dicts for value in dict.values(each) if is_object(value)]
        self._kept = [*known, *(part for part, _ in settled)]  # or an id may become another's
        self.read = set[int]()
        """Elsewhere."""
        self.add_loaders(loaders)
        self._settled = {id(part): names for part, names in settled}
        self._known = {id(each) for each in known}
        self._parts = set[int]()
        for part in (part for model in models for part in all_parts(model)):
            (self._known if self._gives_itself(part) else self._parts).add(id(part))
            for tensors in (held(part, name) for name in _TENSORS):
                if type(tensors) is dict:
                    self._kept += tensors.values()
                    self._known |= {id(each) for each in tensors.values() if each is not None}

    def _gives_itself(self, part: Any) -> bool:
        """Whether a module publishes something of which nobody can tell what it is; else what it is, is settled."""
        if not functions_of(held(part, "get_extra_state")):
            return False
        given = part.get_extra_state()
        if not isinstance(given, Mapping):  # the attributes that it is made of are settled, if that can be told
            return not (type(given) in (tuple, list) or is_array(given))
        self._settled[id(part)] = {*self._settled.get(id(part), ()), *map(str, given)}
        values = [each for each in given.values() if can_change(each)]
        self._kept += values
        self._known |= set(map(id, values))
        return False

    def add_loaders(self, loaders: Iterable[object]) -> None:
        reached = reached_from(loaders)
        self._kept += reached
        self.read |= set(map(id, reached))

    def is_registered(self, path: Sequence[Any]) -> bool:
        """Whether the object at the end of ``path``, or one on the way to it, is given to the Session."""
        return any(id(each) in self._known or id(each) in self._parts for each in path)

    def has(self, path: Sequence[Any], name: str) -> bool:
        """``path``: an object, what its attribute is, and so on, as far as they are known; ``name``: of all of it."""
        if len(path) > 1 and split_name(name)[len(path) - 1] in self._settled.get(id(path[-2]), ()):
            return True
        if any(id(each) in self._known for each in path):
            return True
        of_models = any(id(each) in self._parts for each in path)
        if of_models and len(path) > 1 and id(path[-2]) in self._parts and type(held(path[-2], MODULES)) is not dict:
            return False  # an optimizer, or an object that publishes other attributes than this one
        return of_models and not (is_plain(path[-1]) or moves_when_used(path[-1]) or any(map(counts_for_itself, path)))

    def carries(self, holder: object, key: str, value: object) -> bool:
        """Whether what ``holder`` has at ``key`` (see ``scope.Key``; empty: nowhere) comes back; of an object, whether
        all of it does. What hangs on a parameter does not come back with it.
        """
        if is_object(value) or is_array(holder) or not key:
            return id(value) in self._known
        return self.has([holder, value], f"x{key}" if key.startswith("[") else f"x.{key}")


class Registration(NamedTuple):
    """For the three first parameters of KnownObjects."""

    known: Sequence[object]
    models: Sequence[object]
    settled: Settled


_EXTRA = "get_extra_state"
_NO_STATE = (*FUNCTIONS, *PROPERTIES, MethodDescriptorType, BuiltinMethodType)
"""What it calls: ``self.items()`` of a dict may give anything."""
_OF_OPTIMIZERS = frozenset(("state", "param_groups", "defaults"))
"""What of an optimizer's attributes comes back."""


def own_of(objects: Objects, sources: Iterable[object], settled: Settled, texts: Texts) -> Registration:
    """``objects`` are registered; ``sources`` give the batches; ``settled``: see KnownObjects."""
    registered = [*objects.extra.values(), *objects.rank_extra.values()]
    registered += [each for one in registered for each in getattr(type(one), _CARRIED, lambda _: ())(one)]
    partly = [
        (each, names | set_names(each, texts)) for each in registered if (names := given_names(each, texts)) is not None
    ]
    partly += [(each, _OF_OPTIMIZERS) for each in objects.optimizers]
    loose = [*(each for each in registered if leaves_out(each)), *(each for each, _ in partly)]
    whole = [each for each in registered if not any(each is one for one in loose)]
    known = [each for each in (*objects.schedulers, objects.scaler, *sources, *whole) if each is not None]
    known += [part for one in registered if not leaves_out(one) for part in given_by(one)]
    known += [group for each in objects.optimizers for group in each.param_groups]
    modules = [part for model in objects.models for part in all_parts(model)]
    # Of thousands of modules most are torch's own, and few classes are the user's.
    giving = {kind for kind, one in {id(type(e)): e for e in modules}.items() if functions_of(held(one, _EXTRA))}
    own = [each for each in modules if id(type(each)) in giving]
    partly_given = [(each, names) for each in own if (names := given_names(each, texts, _EXTRA))]
    others = [pair for one in registered for pair in getattr(type(one), _OF_OTHERS, lambda _: ())(one)]
    return Registration(known, (*objects.models, *loose), [*settled, *partly, *partly_given, *others])


def leaves_out(thing: Any) -> bool:
    """Whether it holds what its ``state_dict()`` has not: a module's is torch's own, and so has no number of its
    attributes, or nothing is in it.
    """
    of_torch = type(held(thing, "_modules")) is dict and not functions_of(held(thing, "state_dict"))
    return of_torch or (held(thing, "state_dict") is not UNKNOWN and not thing.state_dict())


def given_names(thing: Any, texts: Texts, verb: str = "state_dict") -> frozenset[str] | None:
    """The attributes that the text of its ``state_dict()``, or other ``verb``, names; None if it is not the user's, or
    may give others.
    """
    names = set[str]()
    for function, owner in functions_of(held(thing, verb), thing):
        code = function.__code__
        text = texts.function(code, function.__globals__)
        if text is None or owner is not thing or not code.co_argcount:
            return None
        itself = [each for each in ast.walk(text) if isinstance(each, ast.Name) and each.id == code.co_varnames[0]]
        found = [each for each in ast.walk(text) if isinstance(each, ast.Attribute) and each.value in itself]
        names |= {each.attr for each in found}
        calls_super = any(isinstance(each, ast.Name) and each.id == "super" for each in ast.walk(text))
        if calls_super or len(found) < len(itself):  # vars(self)
            return None
    values = [held(thing, each) for each in names]
    odd = any(each is UNKNOWN or type(each) in _NO_STATE for each in values) or "__dict__" in names
    return None if odd or not names else frozenset(names)


def set_names(thing: Any, texts: Texts) -> frozenset[str]:
    """The attributes that the text of its ``load_state_dict()`` sets: it makes them of what the other one gives."""
    names = set[str]()
    for function, _ in functions_of(held(thing, "load_state_dict"), thing):
        code = function.__code__
        text = texts.function(code, function.__globals__)
        for each in ast.walk(text) if text is not None and code.co_argcount else ():
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name):
                names |= {each.attr} if each.value.id == code.co_varnames[0] else set()
    return frozenset(names)


def given_by(thing: Any) -> list[object]:
    """The tensors and arrays that its ``state_dict()`` gives, not copies of them: it has them somewhere within."""
    return [*arrays_in(thing.state_dict())] if held(thing, "state_dict") is not UNKNOWN else []
