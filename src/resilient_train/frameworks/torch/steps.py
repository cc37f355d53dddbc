"""Sees every optimizer of this process step: the registered ones for the Session, others for what they may break."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resilient_train.errors import UsageError
from resilient_train.frameworks.base import Conductor, Objects
from resilient_train.frameworks.torch.admission import HOW_TO_REGISTER, stranger


class Steps:
    """Knows the registered optimizers whose ``step()`` is under way, as long as they are not in a closure of the
    user's.
    """

    def __init__(self, objects: Objects) -> None:
        self._optimizers = objects.optimizers
        self._models = objects.models
        self._registered = {id(optimizer): _sizes(optimizer) for optimizer in objects.optimizers}
        """With the sizes of their groups when these were looked at."""
        self._harmless: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers of other models, and how many groups they had when that was found."""
        self._handles: list[Any] = []
        self._running: list[torch.optim.Optimizer] = []
        """The innermost comes last. One may be there twice: where its class and the class above both have hooks."""

    def attach(self, conductor: Conductor) -> None:
        """From now on ``conductor`` is told of each update, and an update by a foreign optimizer is refused."""

        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if optimizer not in self._running:
                self._check_groups(optimizer)
                conductor.before_update(optimizer)
            self._running.append(optimizer)
            closures = any(map(callable, args[1:])) or any(map(callable, kwargs.values()))
            return self._with_closures(args, kwargs) if closures else None

        def after(optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            self._running.pop()
            if optimizer not in self._running:
                conductor.after_update(optimizer)

        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))
        self._handles.append(register_optimizer_step_pre_hook(self._refuse_foreign))

    def detach(self) -> None:
        """Undoes ``attach``."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self) -> None:
        """No step is under way: one that was may have been left by an exception."""
        self._running.clear()

    def check_collective(self, verb: str) -> None:
        """A collective is called. Raises UsageError if an optimizer does it by itself."""
        if self._running:
            name = type(self._running[-1]).__qualname__
            raise UsageError(
                f"{name}.step() called {verb}: an optimizer that communicates by itself can't be recovered, because a "
                "fault in there leaves ranks with different halves of its update, and what it keeps of the exchange is "
                "in no replica; use one that only writes to its own rank's parameters (undo=True does not help here)"
            )

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        sizes = _sizes(optimizer)
        if sizes == self._registered[id(optimizer)]:
            return
        strange = stranger(optimizer, {id(each) for model in self._models for each in model.parameters()})
        if strange is not None:
            raise UsageError(f"{type(optimizer).__qualname__} {strange}: {HOW_TO_REGISTER}")
        self._registered[id(optimizer)] = sizes

    def _with_closures(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = tuple(self._users(each) if callable(each) else each for each in args[1:])
        return (args[0], *own), {key: self._users(each) if callable(each) else each for key, each in kwargs.items()}

    def _users(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure; what it calls is not the optimizer's doing."""

        def call(*args: Any, **kwargs: Any) -> Any:
            running, self._running = self._running, []
            try:
                return closure(*args, **kwargs)
            finally:
                self._running = running

        return call

    def _refuse_foreign(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._registered or self._running:
            return
        groups = len(optimizer.param_groups)
        if self._harmless.get(optimizer) == groups:
            return
        theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            for name, parameter in model.named_parameters():
                if id(parameter) in theirs:
                    raise UsageError(
                        f"{type(optimizer).__qualname__} is about to update {name!r} of the registered model, and is "
                        "not registered itself: nothing of its updates could be recovered; register the optimizer "
                        "that steps, Session(optimizer=...)"
                    )
        self._harmless[optimizer] = groups


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
