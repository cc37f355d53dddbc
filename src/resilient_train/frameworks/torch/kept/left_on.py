"""What a body switches on and off again without ``finally``: a fault that cuts it leaves it on.

``handle = layer.register_forward_hook(...)``, a pass, ``handle.remove()``; ``torch.set_autocast_enabled("cpu", True)``.
The step that runs again would do it twice, and all that come after would run with the first one. So hooks that were
hung on since are taken off, and the switches are what they were. Hooks of libraries stay: these know what they have
hung where.

Not in a loop of calls: what stands in front of a call there is not run again, and a hook may be of that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from resilient_train import script_place
from resilient_train.frameworks.torch.kept.module_entries import ModuleEntries

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def forwards_of(models: Iterable[torch.nn.Module]) -> ModuleEntries[Any]:
    """Where a module has one of its own, in the place of its class's."""
    return ModuleEntries((vars(module), "forward") for model in models for module in model.modules())


class SwitchedOn:
    """Of torch, as they are now, and ``forwards``. ``kind``: of the devices that are trained on."""

    def __init__(self, kind: str, forwards: ModuleEntries[Any]) -> None:
        self._kind = kind
        self._forwards, self._forwards_there = forwards, forwards.now()
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._cache, self._dtype = torch.is_autocast_cache_enabled(), torch.get_default_dtype()
        self._gradients = torch.is_grad_enabled()
        self._hooks = RemovableHandle.next_id

    def put_back(self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], *, called: bool) -> list[str]:
        """The same again, with the hooks that there were; those that are no more. ``called``: in a loop of calls, so
        only whether gradients are on.
        """
        # `with torch.set_grad_enabled(False)` switches before its `with` begins; cut in between, nobody switches back.
        torch.set_grad_enabled(self._gradients)
        if called:
            return []
        self._forwards.put(self._forwards_there, takes_away=True)
        enabled, dtype = self._autocast
        torch.set_autocast_enabled(self._kind, enabled)
        torch.set_autocast_dtype(self._kind, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        return self._take_off(models, optimizers) if RemovableHandle.next_id != self._hooks else []

    def _take_off(self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> list[str]:
        taken = []
        for hooks in _hooks_in(models, optimizers):
            hung_on = [each for each, hook in hooks.items() if each >= self._hooks and _is_users(hook)]
            taken += [_name_of(hooks.pop(each)) for each in hung_on]
        return taken


class TakenOff(NamedTuple):
    """The hooks that a rollback has taken off, and the number that the next handle has when a body runs again."""

    names: Sequence[str] = ()
    next_id: int = 0

    @classmethod
    def of(cls, names: Sequence[str]) -> TakenOff:
        """Now."""
        return cls(names, RemovableHandle.next_id)

    def for_good(self) -> Sequence[str]:
        """Those that the step that has run again has not hung on once more: it has hung on none. What it believes to be
        there is not (``if handle is None``).
        """
        return self.names if RemovableHandle.next_id == self.next_id else ()


class HungOnSince:
    """What the script has hung on a model since this was made, and has not taken off: its hooks, and functions in the
    place of ``forward``. A loop that does so at one step does it once, and a new process has none of it.
    """

    def __init__(self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> None:
        self._models, self._optimizers = models, optimizers
        self._first = RemovableHandle.next_id
        self._forwards = forwards_of(models)
        self._forwards_there = self._forwards.now()

    def names(self) -> list[str]:
        """What each is called, where that is how it is known in another process as well."""
        hooks = (each.items() for each in _hooks_in(self._models, self._optimizers))
        found = [hook for each in hooks for number, hook in each if number >= self._first and _is_users(hook)]
        pairs = zip(self._forwards.now(), self._forwards_there, strict=True)
        found += [now for now, before in pairs if now is not before]
        return sorted(map(_name_of, found))


def _hooks_in(models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> Iterator[dict[int, Any]]:
    """All dictionaries of them, by their handles' numbers."""
    holders: list[tuple[Any, tuple[str, ...]]] = [(each, _OF_OPTIMIZERS) for each in optimizers]
    for model in models:
        holders += ((module, _OF_MODULES) for module in model.modules())
        holders += ((parameter, _OF_TENSORS) for parameter in model.parameters())
    for holder, names in holders:
        yield from filter(None, (getattr(holder, name, None) for name in names))


def _function_of(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _name_of(hook: Any) -> str:
    function = _function_of(hook)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _is_users(hook: Any) -> bool:
    hook = _function_of(hook)
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is not None:
        return script_place.is_users(code.co_filename)
    return script_place.is_users(getattr(sys.modules.get(type(hook).__module__), "__file__", None) or "")
