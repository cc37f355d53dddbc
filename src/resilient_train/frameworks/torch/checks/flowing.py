"""What flows from one step into the next in memory that nobody registers: a hidden state, a batch fetched ahead.

A step that is redone finds there what its cut body has put in, and a new process nothing of it: other bits, and no
error. So it is looked for, and refused: memory that a tensor has got or was written to in one window, and that the
graph of the next one's backward pass keeps without a write in between. It must happen in several windows in a row: a
table that grows with the longest batch is made anew now and then.

The graph says only what it keeps, so this is not all. Not seen: what is only added (``x + state``), what is made of it
first where no gradient is asked for (``x / std``), numbers (``item()``), what the gradients are not computed from, what
a checkpointed part takes in, and a loop that calls ``session.call``: what stands between two calls may make anything.
Operations are not looked at (a ``TorchDispatchMode`` changes the bits of some: docs/decisions/0033-carried.md).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from resilient_train.errors import UsageError
from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.checks.moving import Moving
from resilient_train.frameworks.torch.tensors.extra_state import with_extra_state
from resilient_train.frameworks.torch.tensors.storages import registered
from resilient_train.frameworks.torch.watching.operations import in_memory, storage_of
from resilient_train.frameworks.torch.watching.reached import named, reached
from resilient_train.frameworks.torch.watching.replaced import replace

_FIRST, _LAST = 1, 8
"""The windows that are looked at, at most: the first of all makes tables, and compiles."""
_IN_A_ROW = 5
_MANY = 100_000
"""Where there are more tensors nothing is looked for: it would take seconds."""
_TOLD = 3
_ELSE = "A step that is redone, and a new process, would find something else there"


class _Left(NamedTuple):
    """Memory that one window leaves to the next."""

    made: bool
    """In this window, and not only written."""
    version: int
    name: str = ""
    """In the script, if it was looked for."""

    def is_read(self, tensor: torch.Tensor) -> bool:
        """By a graph that keeps this tensor of it: a buffer that is filled anew in each window is none that flows."""
        return self.made or tensor._version == self.version


class Flowing:
    """Looked for in the first windows of a process, until one has nothing of it."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._given: Callable[[], Collection[Any] | None] = lambda: None
        self._windows = 0
        self._alive: dict[StorageWeakRef, int] = {}
        """As the window began, and how often each was written by then."""
        self._left: dict[StorageWeakRef, _Left] = {}
        self._now: dict[StorageWeakRef, str] = {}
        """What of that the graphs of this window keep; for people."""
        self._read: list[dict[StorageWeakRef, bool]] = []
        """The same of the windows before, in a row, that have kept something: whether it was made, or only written."""
        self._moving = Moving()
        self._over = False
        self._put_back: Callable[[], None] | None = None

    def attach(self, given: Callable[[], Collection[Any] | None]) -> None:
        """The loop begins. ``given`` says what the script was given for the window, and what will give it the next:
        that comes back with a redo. None: nothing is looked for.
        """
        self._given = given

    def begin(self) -> None:
        """A window begins. All objects are looked at, twice as a rule in the life of a process: 50 ms each."""
        if self._over:
            return
        if self._now:
            self._read.append({each: self._left[each].made for each in self._now})
        else:
            self._read.clear()
        self._now = {}
        given = self._given()
        clean = self._windows > _FIRST + 1 and not self._read and not self._moving.found
        if given is None or clean or self._windows > _LAST or not self._look(given):
            self.close()
            return
        self._windows += 1

    def _look(self, given: Collection[Any]) -> bool:
        """False: there is too much to look at."""
        if self._windows < _FIRST:
            return True
        everything, objects = gc.get_objects(), self._objects
        tensors = list(_tensors(everything))
        if len(tensors) > _MANY:
            return False
        alive, before = _versions(tensors), self._alive
        self._alive = alive
        self._moving.look(everything, loaders=not given)
        if self._windows == _FIRST:
            return True
        extra = (*objects.extra.values(), *objects.rank_extra.values(), objects.scaler)
        published = [
            each for model in objects.models for _, part in with_extra_state(model) for each in _given_by(part)
        ]
        own = reached((*extra, *published))
        if own is None:
            return False
        self._moving.leave_out(own)
        known = registered(objects) | _storages(_tensors(own)).keys()
        left = {each: count for each, count in alive.items() if before.get(each) != count and each not in known}
        names = _names(left.keys()) if len(self._read) == _IN_A_ROW - 1 else {}
        self._left = {each: _Left(each not in before, count, names.get(each, "")) for each, count in left.items()}
        self._look_at_passes()
        return True

    def _look_at_passes(self) -> None:
        if self._put_back is not None:
            return
        autograd: Any = torch.autograd
        run = autograd._engine_run_backward

        def look_and_run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if self._left and not self._now:
                self._now = self._kept_of_before(roots)
            return run(roots, *args, **kwargs)

        self._put_back = replace(autograd, "_engine_run_backward", look_and_run)

    def _kept_of_before(self, roots: Iterable[Any]) -> dict[StorageWeakRef, str]:
        """What of the memory that the window before has left the graph of a backward pass keeps."""
        left = self._left
        found = {memory: each for memory, each in _storages(_kept(roots)).items() if memory in left}
        kept = {memory: each for memory, each in found.items() if left[memory].is_read(each)}
        if kept:
            given = reached(self._given() or ())
            if given is None:
                return {}
            for each in _storages(_tensors(given)):
                kept.pop(each, None)
        return {
            memory: left[memory].name or f"a tensor {(*each.shape,)} of {each.dtype}" for memory, each in kept.items()
        }

    def check(self) -> None:
        """An optimizer is about to write. Raises UsageError."""
        if self._over:
            return
        if self._now and len(self._read) == _IN_A_ROW - 1 and self._is_dropped():
            raise UsageError(
                "gradients are computed from what the step before has written, and is not registered: "
                f"{' and '.join(sorted(set(self._now.values()))[:_TOLD])}. {_ELSE}. Register what holds it "
                "(a GradScaler: scaler=), keep it in rt.Carried, or make it anew in each step "
                "(docs/how-to/load-data.md)"
            )
        if thing := self._moving.often(_IN_A_ROW):
            raise UsageError(
                f"{thing} goes on in each step, and is not registered. {_ELSE}. Give the loader to the Session "
                "(loader=) and take step.batch, or make it from step.number (docs/how-to/load-data.md)"
            )

    def _is_dropped(self) -> bool:
        """Whether what the windows have read is gone by now, or written in place: a cache keeps what is made for it.
        The last one's may be in a variable still.
        """
        expired: Callable[[StorageWeakRef], bool] = StorageWeakRef.expired
        return all(any(not made or expired(each) for each, made in read.items()) for read in self._read[:-1])

    def forget(self) -> None:
        """The window is taken back. What its body has left behind says nothing."""
        self._stop()
        self._windows = 0

    def close(self) -> None:
        """Idempotent."""
        self._stop()
        self._over = True

    def _stop(self) -> None:
        self._alive, self._left, self._now = {}, {}, {}
        self._read.clear()
        self._moving.forget()
        if self._put_back is not None:
            self._put_back()
            self._put_back = None


def _given_by(part: torch.nn.Module) -> list[Any]:
    """What a module publishes; and all that it has itself, unless that is numbers alone: it may give copies."""
    given = part.get_extra_state()
    return [given] if _is_plain(given) else [given, *(each for name, each in vars(part).items() if name != "_modules")]


def _is_plain(given: Any) -> bool:
    if isinstance(given, (dict, list, tuple)):
        return all(map(_is_plain, given.values() if isinstance(given, dict) else given))
    return given is None or isinstance(given, (bool, int, float, str, bytes))


def _tensors(objects: Iterable[Any]) -> Iterator[Any]:
    """Those among them with memory of their own. The garbage collector knows them in one that wraps others, too."""
    base, plain = torch.Tensor, dict[int, bool]()
    for each in objects:
        kind: Any = type(each)
        if id(kind) not in plain:  # a class of the user's may not want to be a key
            plain[id(kind)] = issubclass(kind, base) and kind.__torch_dispatch__ is base.__torch_dispatch__
        if plain[id(kind)]:
            yield each


def _versions(tensors: Iterable[torch.Tensor]) -> dict[StorageWeakRef, int]:
    """How often the memory of each was written. Of inference tensors torch does not say."""
    found: dict[StorageWeakRef, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for each in tensors:
            with contextlib.suppress(RuntimeError):
                memory, version = storage_of(each), each._version
                found[memory] = max(version, found.get(memory, 0))
    return found


def _storages(tensors: Iterable[torch.Tensor]) -> dict[StorageWeakRef, torch.Tensor]:
    """Of those that have one: a sparse one, and what ``vmap`` makes, have none."""
    found: dict[StorageWeakRef, torch.Tensor] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for each in tensors:
            with contextlib.suppress(RuntimeError):
                found[storage_of(each)] = each
    return found


def _kept(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors that a graph keeps for its backward pass, or ends at. What an operation's own function makes of them
    when they are unpacked (checkpoints compute anew) is not asked for.
    """
    todo = [getattr(each, "grad_fn", None) or getattr(each, "node", None) for each in roots]
    seen, saving = set[Any](), dict[int, list[str]]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        kind = type(node)
        if id(kind) not in saving:
            saving[id(kind)] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in saving[id(kind)]:
            with contextlib.suppress(RuntimeError):  # freed by an earlier pass
                for each in _listed(getattr(node, name)):
                    yield from _in_memory(getattr(each, "data", None))
        yield from _in_memory(getattr(node, "variable", None))
        for value in getattr(node, "__dict__", {}).values():
            for each in _listed(value):
                yield from _in_memory(each)


def _listed(value: Any) -> Iterable[Any]:
    return value if type(value) is list or type(value) is tuple else (value,)


def _in_memory(value: Any) -> list[torch.Tensor]:
    return in_memory(value) if issubclass(type(value), torch.Tensor) else []


def _names(wanted: AbstractSet[StorageWeakRef]) -> dict[StorageWeakRef, str]:
    """How the script calls each, as far as it is near to a variable."""
    found: dict[StorageWeakRef, str] = {}
    for name, each in named():
        for memory in _storages(_in_memory(each)).keys() & wanted:
            found.setdefault(memory, name)
    return found
