"""What replicas share, as the bodies of a window found it: a redo goes back to that, and a snapshot is of that.

Most of it is written by the update alone, when the bodies are over, and needs no copy. What a script writes before it
does:

* settings, schedulers and the scaler, and small state of the user's: always;
* what a module and a parameter go by (``training``, ``requires_grad``, ``module_switches.py``, ``module_values.py``),
  and which gradients there were: always. A gradient is put back as zeros: what it held is of an update that is over;
* a tensor that was once seen to be written by a body, or between the head of the loop and the body (the key encoder of
  MoCo, weights that are swapped for an evaluation): from the next window on. The copy takes no longer than to write it.

It is seen by torch's version counters, which cost 0.2 us a tensor. They miss what is written in place to
``parameter.data``, so in the first windows memory of the host is compared by digest as well. What is only put in the
place of something (``parameter.data = ...``, another parameter, another module) needs no copy: what was there is known.

What was written for the first time in the very window that a fault brings back is lost: see ``put_back``. What is
written behind a body that was cut is not: all is copied when it is cut.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from resilient_train import _native
from resilient_train.frameworks.roles import Objects, StateMark, WrittenEarly
from resilient_train.frameworks.torch.kept import module_values
from resilient_train.frameworks.torch.kept.left_on import HungOnSince
from resilient_train.frameworks.torch.kept.module_entries import ModuleEntries
from resilient_train.frameworks.torch.kept.module_switches import Held, ModuleSwitches, Switched
from resilient_train.frameworks.torch.kept.module_values import ModuleValues, ValuesOf
from resilient_train.frameworks.torch.kept.watched_state import (
    LOOKED_AT,
    WatchedState,
    digest_of_state,
    size_of,
    tensors_in,
)
from resilient_train.frameworks.torch.sharding.sharded import placed_like
from resilient_train.frameworks.torch.tensors.fingerprint import tensor_digest
from resilient_train.frameworks.torch.tensors.leaves import (
    is_plainly_dense,
    is_sharded,
    local,
    memory_of,
    state_of,
    version_of,
)
from resilient_train.protocol.messages import EXCHANGED, HOOKS, KEPT_BACK

LIVES_ON = "resilient_lives_on"
"""An attribute of state that a process which lives on brings up to date by itself: it is not put back there."""
_SHOWS = "resilient_shows"
"""A method of such state: what of it may be another on each rank, by name."""

_VERSION = operator.attrgetter("_version")
_TRAINING = operator.attrgetter("training")

Key = tuple[int, str]
"""A parameter: the number of its model, its name there."""


class Modes(msgspec.Struct, array_like=True, frozen=True):
    """What a process that takes another one's place is to find: the modules that evaluate, the parameters that are not
    trained, and those that have a gradient (a sparse one without entries is as good as none), switches and values.
    """

    evaluating: tuple[Key, ...]
    frozen: tuple[Key, ...]
    with_gradient: tuple[Key, ...]
    switched: tuple[Switched, ...] = ()
    values: tuple[ValuesOf, ...] = ()


class _Modes(NamedTuple):
    """Of all modules, and of all parameters that can be kept."""

    training: list[bool]
    requires_grad: list[bool]
    with_gradient: list[bool]
    switched: Held
    values: module_values.HeldValues


class _Seen(NamedTuple):
    """Of all parameters that can be kept, as they are."""

    versions: list[int]
    requires_grad: list[bool]
    gradients: list[torch.Tensor | None]
    where: list[int]


class _Place(NamedTuple):
    """Where a module has a parameter. A script may put another one there."""

    key: Key
    owner: dict[str, torch.nn.Parameter | None]
    name: str


class _Watched(NamedTuple):
    """``alias`` has the memory that the window found, whatever the parameter is given later."""

    place: _Place
    tensor: torch.Tensor
    alias: torch.Tensor


class KeptState:
    """Of the registered objects. A window is open from ``begin`` to ``forget``."""

    def __init__(self, objects: Objects) -> None:
        self._models = objects.models
        self._places: list[_Place] = []
        self._parts: ModuleEntries[torch.nn.Module] = ModuleEntries(())
        self._parts_there: list[torch.nn.Module | None] = []
        """Of all modules the ones in them: a script may put others there."""
        self._modules: list[tuple[Key, torch.nn.Module]] = []
        self._training: ModuleEntries[bool] | None = None
        """``training`` of all; None: not all have it in their dictionaries (a scripted one)."""
        self._switches = ModuleSwitches(())
        self._values = ModuleValues()
        self._hung_on = HungOnSince(objects.models, objects.optimizers)
        self._modes = _Modes([], [], [], [], module_values.HeldValues([], []))
        self._parameters: ModuleEntries[torch.nn.Parameter] = ModuleEntries(())
        self._there: list[torch.Tensor | None] = []
        """What the window found in these places, and ..."""
        self._watched: list[_Watched] = []
        self._tensors: list[torch.Tensor] = []
        self._aliases: list[torch.Tensor] = []
        """... what of it can be kept."""
        self.version: Callable[[Any], int] = _VERSION
        self.address: Callable[[Any], int] = torch.Tensor.data_ptr
        """Of one of them; others where there are DTensors, whose memory is another tensor's."""
        self._version_getter: str | Callable[[Any], int] = "_version"
        self._versions: list[int] = []
        self._words = _native.SampledWords([])
        """Of what lies on the host: a write to ``parameter.data`` moves no version."""
        self._words_at: list[int] = []
        self._digests: list[str] = []
        self._early: set[Key] = set()
        """The parameters that are written before updates, and ..."""
        self._copies: dict[Key, torch.Tensor] = {}
        """... what this window found in them; of others too, where all of it is kept."""
        self._behind: dict[Key, torch.Tensor] = {}
        """What the others were when the body was cut: code that stands behind it runs all the same."""
        self.states = [
            WatchedState(name, thing) for name, thing in objects.extra.items() if not getattr(thing, LIVES_ON, False)
        ]
        self._shows = [getattr(each, _SHOWS) for each in objects.extra.values() if hasattr(type(each), _SHOWS)]
        self.small: dict[str, Any] = {}
        """Schedulers, scaler and settings, as the window found them (``State.small_copy``)."""
        self._windows = 0
        self._open = self._cut = self._sealed = False
        self._lost: list[str] = []
        self._found: list[str] = []

    def begin(self, small: dict[str, Any], *, whole: bool = False) -> None:
        """All is as a window finds it. ``whole``: there is a reason to go back in this one, so all of it is kept."""
        self.small = small
        self._open, self._cut, self._sealed = True, False, False
        self._lost.clear()
        self._behind.clear()
        seen = self._find()
        self._modes = self._modes_of(seen)
        self._keep(whole=whole)
        self._mark(seen.versions, digests=self.looks_closely)
        for state in self.states:
            state.begin(whole=whole)

    def _find(self) -> _Seen:
        """Nearly always all is what and where it was."""
        if not self._places or not self._parts.are(self._parts_there):
            self._places = _places(self._models)
            self._parameters = ModuleEntries((each.owner, each.name) for each in self._places)
            self._parts = ModuleEntries(_parts(self._models))
            self._parts_there = self._parts.now()
            self._modules = [
                ((index, name), module)
                for index, model in enumerate(self._models)
                for name, module in model.named_modules()
            ]
            dicts = [vars(module) for _, module in self._modules]
            scripted = any("training" not in each for each in dicts)
            self._training = None if scripted else ModuleEntries((each, "training") for each in dicts)
            self._switches = ModuleSwitches(self._models)
            self._values = ModuleValues(self._modules, self._values)
        if self._parameters.are(self._there):
            seen, where = self._seen(), self._where()
            if seen.where == where:
                self._words_from(where)
                return seen
        there = self._parameters.now()
        self._there = [*there]
        pairs = zip(self._places, there, strict=True)
        found = [(place, each) for place, each in pairs if each is not None and can_be_watched(each)]
        self._watched = [_Watched(place, each, local(each)) for place, each in found]
        self._tensors = [each.tensor for each in self._watched]
        self._aliases = [each.alias for each in self._watched]
        if any(map(is_sharded, self._tensors)):
            self.version, self.address = version_of, _address_of
            self._version_getter = version_of
        self._words_from(self._where())
        return self._seen()

    def _seen(self) -> _Seen:
        return _Seen(*_native.columns(self._tensors, (self._version_getter, "requires_grad", "grad", self.address)))

    def _where(self) -> list[int]:
        return _native.columns(self._aliases, (torch.Tensor.data_ptr,))[0]

    def _words_from(self, where: list[int]) -> None:
        if where != self._words_at:
            self._words_at = where
            self._words = _native.SampledWords([*map(_words_of, self._aliases)])

    def modes_now(self) -> _Modes:
        """Of what the window found: modules, parameters."""
        return self._modes_of(self._seen())

    def _modes_of(self, seen: _Seen) -> _Modes:
        strided = torch.strided
        return _Modes(
            self._training_now(),
            seen.requires_grad,
            [each is not None and each.layout is strided for each in seen.gradients],
            self._switches.held(),
            self._values.held(),
        )

    def _training_now(self) -> list[bool]:
        if self._training is None:
            return [*map(_TRAINING, self.modules())]
        known = self._modes.training
        return known if self._training.are(known) else [*map(bool, self._training.now())]

    def _keep(self, *, whole: bool) -> None:
        """In the memory of the copies before. What has none now may not be put back from an older window."""
        before, self._copies = self._copies, {}
        for place, tensor, _ in self._watched if whole or self._early else ():
            if not (whole or place.key in self._early):
                continue
            copy = before.get(place.key)
            if copy is not None and are_alike(copy, held := local(tensor)):
                self._copies[place.key] = copy.copy_(held)
            else:
                _clone_into(self._copies, place.key, local(tensor))

    def _mark(self, versions: list[int], *, digests: bool) -> None:
        self._versions = versions
        self._words.take()
        self._digests = [digest_of(each.alias) for each in self._watched] if digests else []

    def look(self) -> None:
        """The bodies have come to their end, or to where it matters what they have written."""
        if not self.open:
            return
        versions, where = _native.columns(self._tensors, (self._version_getter, self.address))
        # A body may let memory go. What it has put in a parameter's place is elsewhere, and the memory is still there.
        there = where == self._words_at or self._where() == self._words_at
        words = self._words.changed() if there else []
        if self._digests or words or versions != self._versions:
            self._look_at(versions, words)
        if not self._cut:
            for state in self.states:
                if state.look():
                    self._lost.append(state.told)

    def _look_at(self, versions: list[int], words: list[int]) -> None:
        """Only what has no copy can be lost."""
        digests = self._digests or [""] * len(self._tensors)
        each_of = zip(self._watched, versions, self._versions, digests, strict=True)
        for index, ((place, _, alias), version, was, digest) in enumerate(each_of):
            if place.key in self._copies or place.key in self._behind:
                continue
            now = digest_of(alias) if digest else ""
            other = now != digest if now else version != was or index in words
            if other:
                self._lost.append(_told(place.key))
            if (other or version != was) and not self._cut and place.key not in self._early:
                self._early.add(place.key)
                self._found.append(_told(place.key))
        self._versions = versions
        if words:
            self._words.take()

    def written(self) -> set[int]:
        """The ids of the parameters that were written since the bodies came to their end: by the optimizers."""
        now = map(self.version, self._tensors)
        return {id(each) for each, at, was in zip(self._tensors, now, self._versions, strict=True) if at != was}

    def found(self) -> WrittenEarly | None:
        """What was seen to be written early, since the last call."""
        names, self._found = self._found, []
        names += [state.told for state in self.states if state.was_found()]
        if not names:
            return None
        early = [each.tensor for each in self._watched if each.place.key in self._early]
        states = [state_of(state.thing) for state in self.states if state.early]
        return WrittenEarly(names, sum(map(size_of, tensors_in([early, states]))))

    def modes(self, *, within: bool) -> Modes:
        """For another process. ``within`` a step the script may have them otherwise for a moment (it evaluates), so
        those count with which the window has begun.
        """
        if self._open or (within and self._windows):
            held = self._modes
        else:
            held = self._modes = self._modes_of(self._find())
        places = [each.place.key for each in self._watched]
        return Modes(
            tuple(key for (key, _), training in zip(self._modules, held.training, strict=True) if not training),
            tuple(key for key, trained in zip(places, held.requires_grad, strict=True) if not trained),
            tuple(key for key, there in zip(places, held.with_gradient, strict=True) if there),
            self._switches.told(held.switched),
            self._values.told(held.values),
        )

    def take_modes(self, modes: Modes) -> None:
        """Those of another process. A gradient that is there is of what the script does before its loop."""
        self._find()
        evaluating, frozen, with_gradient = map(set, (modes.evaluating, modes.frozen, modes.with_gradient))
        for key, module in self._modules:
            _set_training(module, on=key not in evaluating)
        for place, tensor, _ in self._watched:
            _set_requires_grad(tensor, on=place.key not in frozen)
            if place.key in with_gradient:
                zero([(tensor, tensor.grad)])  # where the script has laid it, if it has
            else:
                tensor.grad = None
        self._switches.take(modes.switched)
        self._values.take(modes.values)

    def otherwise(self, modes: Modes) -> list[str]:
        """What another process had, and this one has not, or otherwise."""
        mine = self.modes(within=False)
        names = [(key, "training") for key in {*modes.evaluating} ^ {*mine.evaluating}]
        names += [(key, "requires_grad") for key in {*modes.frozen} ^ {*mine.frozen}]
        names += module_values.unlike(modes.values, mine.values)
        return sorted({_attribute(key, name) for key, name in names})

    def settled(self) -> list[tuple[object, frozenset[str]]]:
        """See ``frameworks/roles.Window``."""
        return self._values.settled()

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The parameters that had a gradient when the window began, and what is in its place, to be zeroed."""
        return [(each, each.grad) for each, had in zip(self._tensors, self._modes.with_gradient, strict=True) if had]

    def early_parameters(self) -> tuple[Key, ...]:
        """What is known to be written before updates, for a new process ..."""
        return tuple(self._early)

    def early_states(self) -> tuple[str, ...]:
        """... and of the user's large states."""
        return tuple(state.name for state in self.states if state.early)

    def learn(self, parameters: Iterable[Key], states: Iterable[str]) -> None:
        """What another process knew of them."""
        self._early |= set(parameters)
        names = set(states)
        for state in self.states:
            state.early = state.early or state.name in names

    def modules(self) -> list[torch.nn.Module]:
        """Those that the window found."""
        return [module for _, module in self._modules]

    def marks(self) -> dict[str, StateMark]:
        """See ``frameworks/roles.State``; not of what is never put back."""
        return {state.name: state.mark() for state in self.states}

    def digests(self) -> list[tuple[str, str]]:
        """Of each object of the user's, of what its modules have otherwise than as they were built, and of those that
        are in another's place: the name, and what it is now. Of what keeps itself up to date, only what it shows.
        """
        states = [(f"state[{state.name!r}]", digest_of_state(state_of(state.thing))) for state in self.states]
        states += [(name, digest_of_state(held)) for shows in self._shows for name, held in shows().items()]
        values: list[tuple[str, Any]]
        values = [(_attribute(key, name), value) for key, name, value in self._values.changed()]
        values += [(_attribute(key, name) + KEPT_BACK, value) for key, name, value in self._values.kept_back()]
        values += [(_told(key) + EXCHANGED, what) for key, what in self._values.exchanged()]
        values += [(HOOKS, hooks)] if (hooks := self._hung_on.names()) else []
        return states + [(name, xxhash.xxh3_128_hexdigest(repr(value).encode())) for name, value in values]

    @property
    def lost(self) -> str:
        """What was written since the window began, and was not kept; empty: nothing."""
        return self._lost[0] if self._lost else ""

    def cut(self) -> None:
        """The body is left, and its step will run again. What the script does behind it before is not to count."""
        if not self.open or self._cut:
            return
        self.look()
        self._cut = True
        for place, _, alias in self._watched:
            if place.key not in self._copies:
                _clone_into(self._behind, place.key, alias)
        self._words_from(self._where())
        self._mark(self._seen().versions, digests=False)
        for state in self.states:
            state.cut()

    def seal(self) -> None:
        """A copy of all is made, and is put back first. From here on the update writes."""
        self.look()
        self._sealed = True

    def put_back(self, *, intact: bool = True) -> None:
        """The window begins again. ``lost`` tells whether that is possible. ``intact``: nothing else has written, as an
        update that was cut, or damage.
        """
        if not self._open:
            return
        if intact:
            self.look()
        self.put_parts(self._parts_there)
        for each in self._watched:
            self._put_back(*each)
        for state in self.states:
            state.put_back()
        self.put_modes(self._modes)

    def parts_now(self) -> list[torch.nn.Module | None]:
        """Which modules are where the window has found some."""
        return self._parts.now()

    def put_parts(self, parts: list[torch.nn.Module | None]) -> None:
        """What ``parts_now`` was."""
        self._parts.put(parts)

    def put_modes(self, modes: _Modes) -> None:
        """What ``modes_now`` was, without the gradients."""
        for (_, module), training in zip(self._modules, modes.training, strict=True):
            _set_training(module, on=training)
        for tensor, trained in zip(self._tensors, modes.requires_grad, strict=True):
            _set_requires_grad(tensor, on=trained)
        self._switches.put_back(modes.switched)
        self._values.put_back(modes.values)

    def _put_back(self, place: _Place, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        if place.owner.get(place.name) is not tensor:
            place.owner[place.name] = tensor  # type: ignore[assignment] # a parameter: it was there
        held = local(tensor)
        if not are_alike(alias, held) or held.data_ptr() != alias.data_ptr():
            memory_of(tensor).data = alias
        copy = self._copies.get(place.key, self._behind.get(place.key))
        if copy is not None:
            with torch.no_grad():
                local(tensor).copy_(copy)

    def forget(self) -> None:
        """The update is applied, or all is to be a copy of a replica's."""
        self._windows += self._open
        self._open = False
        self._behind.clear()

    @property
    def looks_closely(self) -> bool:
        """Whether this is one of the first windows, in which what the version counters miss is looked for."""
        return self._windows < LOOKED_AT

    # -- as the window found it

    @property
    def open(self) -> bool:
        """Whether a window is, and nothing but its bodies has written since it began."""
        return self._open and not self._sealed

    def parameters(self, models: list[dict[str, torch.nn.Parameter]]) -> None:
        """In ``models``, each with its names: what the window found in their places."""
        for place, tensor, _ in self._watched:
            index, name = place.key
            if name in models[index]:
                models[index][name] = tensor  # type: ignore[assignment] # a parameter

    def contents(self, models: list[dict[str, torch.Tensor]]) -> None:
        """The same with what these held."""
        for (index, name), copy in self._copies.items():
            if name in models[index]:  # of one that is in two places there is one
                there = models[index][name]
                models[index][name] = placed_like(there, copy) if is_sharded(there) else copy

    def has_copy(self, parameter: torch.Tensor) -> bool:
        """Whether this window would put it back, however often its bodies have written it."""
        return any(each.tensor is parameter and each.place.key in self._copies for each in self._watched)

    def kept_states(self) -> dict[str, Any]:
        """Of the user's states, those that are kept."""
        return {state.name: state.kept for state in self.states if state.kept is not None}


def _places(models: tuple[torch.nn.Module, ...]) -> list[_Place]:
    """As ``named_parameters`` has them; one that is in two places has both."""
    return [
        _Place((index, f"{prefix}.{name}" if prefix else name), module._parameters, name)
        for index, model in enumerate(models)
        for prefix, module in model.named_modules()
        for name in module._parameters
    ]


def _parts(models: tuple[torch.nn.Module, ...]) -> Iterator[tuple[dict[str, torch.nn.Module | None], str]]:
    for model in models:
        for module in model.modules():
            yield from ((module._modules, name) for name in module._modules)


def _set_training(module: torch.nn.Module, *, on: bool) -> None:
    if module.training is not on:
        module.training = on


def _set_requires_grad(parameter: torch.Tensor, *, on: bool) -> None:
    if parameter.requires_grad is not on:
        parameter.requires_grad_(on)


def zero(gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Gives parameters a gradient of zeros, in the memory of the one that they had."""
    with torch.no_grad():
        for parameter, held in gradients:
            as_it_was = held is not None and are_alike(held, parameter) and not held.requires_grad
            parameter.grad = held.zero_() if as_it_was and held is not None else torch.zeros_like(parameter)


def _told(key: Key) -> str:
    """As checkpoints call it."""
    return f"model.{key[0]}.{key[1]}"


def _attribute(key: Key, name: str) -> str:
    return f"{_told(key)}.{name}".replace("..", ".")


def _words_of(memory: torch.Tensor) -> tuple[int, int]:
    dense = memory.is_cpu and is_plainly_dense(memory)
    return (memory.data_ptr(), memory.nbytes) if dense else (0, 0)


def can_be_watched(tensor: torch.Tensor) -> bool:
    return not torch.nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_inference()


def _address_of(tensor: torch.Tensor) -> int:
    return memory_of(tensor).data_ptr()


def are_alike(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device)


def _clone_into(copies: dict[Key, torch.Tensor], key: Key, tensor: torch.Tensor) -> None:
    """Without memory for it the job goes on as if it had not been seen."""
    with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
        copies[key] = tensor.detach().clone()


def digest_of(tensor: torch.Tensor) -> str:
    """Empty: there is no memory to make it in. On a device that takes 64 MiB."""
    with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
        return tensor_digest(tensor)
    return ""


def digest_of_host(tensor: torch.Tensor) -> str:
    """Empty: it lies in the memory of a device, and would have to be copied from there."""
    return tensor_digest(tensor) if tensor.is_cpu else ""
