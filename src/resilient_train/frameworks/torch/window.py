"""A window of steps, and every optimizer of this process: see ``frameworks/roles.Window``.

The registered optimizers are seen for the Session, the others for what they may break.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resilient_train import config
from resilient_train.errors import TransferError, UsageError
from resilient_train.frameworks.roles import Objects, Updates, WrittenEarly
from resilient_train.frameworks.torch.checks import cuda_graphs
from resilient_train.frameworks.torch.checks.admission import HOW_TO_REGISTER, held_optimizers, stranger
from resilient_train.frameworks.torch.checks.carried_gradients import CarriedGradients
from resilient_train.frameworks.torch.checks.flowing import Flowing
from resilient_train.frameworks.torch.checks.parameter_samples import Samples
from resilient_train.frameworks.torch.checks.unregistered import Unregistered
from resilient_train.frameworks.torch.communication.buckets import Buckets, PassHistory
from resilient_train.frameworks.torch.kept.generators import random_state, restore_random_state
from resilient_train.frameworks.torch.kept.kept_state import Key, Modes, zero
from resilient_train.frameworks.torch.kept.left_on import SwitchedOn, TakenOff, forwards_of
from resilient_train.frameworks.torch.kept.optimizer_states import WrittenStates
from resilient_train.frameworks.torch.rank_state import TorchRankState
from resilient_train.frameworks.torch.sharding.zero import is_zero, stepping
from resilient_train.frameworks.torch.state import TorchState
from resilient_train.frameworks.torch.tensors.containers import copy_tree
from resilient_train.frameworks.torch.watching.uncompiled import uncompiled
from resilient_train.observe.sinks import say_aside
from resilient_train.script_place import line


class _Start(NamedTuple):
    """What a redo of the window goes back to; the parameters have not changed by then."""

    random: bytes
    switches: SwitchedOn
    shares_buffers: list[bool]


class _Learnt(PassHistory, array_like=True):
    """And what the script writes before its updates."""

    parameters: tuple[Key, ...] = ()
    states: tuple[str, ...] = ()
    modes: Modes | None = None


class TorchWindow:
    """Knows the registered optimizers whose ``step()`` is under way, as long as they are not in a closure of the
    user's. ``behind_closure`` is called when one has run.
    """

    def __init__(
        self,
        objects: Objects,
        state: TorchState,
        rank_state: TorchRankState,
        behind_closure: Callable[[], None],
        unregistered: Unregistered,
    ) -> None:
        self._unregistered = unregistered
        self._behind_closure = behind_closure
        self._objects = objects
        self._state = state
        self._rank_state = rank_state
        self._samples = Samples(objects.models)
        self._states = WrittenStates(objects.optimizers)
        self._buckets = Buckets(objects.models)
        self._carried_gradients = CarriedGradients(objects.models)
        self._flowing = Flowing(objects)
        parameter = next((each for model in objects.models for each in model.parameters()), None)
        self._kind = parameter.device.type if parameter is not None else "cpu"
        self._forwards = forwards_of(objects.models)
        self._given: Callable[[], Collection[Any] | None] = tuple
        """See ``Updates``; until it is attached."""
        self._start: _Start | None = None
        self._taken_off = TakenOff()
        self._undo: dict[str, Any] | None = None
        self._registered = {id(optimizer): _sizes(optimizer) for optimizer in objects.optimizers}
        """With the sizes of their groups when these were looked at."""
        self._writing = {id(stepping(optimizer)): optimizer for optimizer in objects.optimizers}
        """The registered ones, by the one whose ``step()`` writes."""
        self._harmless: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers of other models, and how many groups they had when that was found."""
        self._handles: list[Any] = []
        self._running: list[torch.optim.Optimizer] = []
        """The innermost comes last. One may be there twice: where its class and the class above both have hooks."""
        self._asked: torch.optim.Optimizer | None = None
        """The one that the gradient scaler was asked to step, as long as it has not."""

    def attach(self, updates: Updates) -> None:
        """From now on ``updates`` is told of each, and one by a foreign optimizer is refused."""

        def before(writes: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            optimizer = self._writing[id(writes)]
            closures = any(map(callable, args[1:])) or any(map(callable, kwargs.values()))
            if optimizer is self._asked:
                self._asked = None
            if optimizer not in self._running:
                self._check_groups(optimizer)
                if not closures:
                    self._check_flow(optimizer)
                updates.before_update(optimizer)
            self._running.append(optimizer)
            return self._with_closures(args, kwargs) if closures else None

        def after(writes: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            optimizer = self._writing[id(writes)]
            self._running.pop()
            if optimizer not in self._running:
                self._state.sharding.optimizer_wrote()
                updates.after_update(optimizer)

        uncompiled(before, after, type(self)._refuse_foreign)
        self._given = updates.given
        self._flowing.attach(updates.given)
        self._state.sharding.find_others()
        for optimizer in self._objects.optimizers:
            writes = stepping(optimizer)
            self._handles.append(writes.register_step_pre_hook(before))
            self._handles.append(writes.register_step_post_hook(after))
        self._handles.append(register_optimizer_step_pre_hook(self._refuse_foreign))
        self._handles.append(register_module_module_registration_hook(self._refuse_wrapper))
        self._handles.append(cuda_graphs.Refusal())
        if self._objects.scaler is not None:
            self._hook_scaler(updates)

    def _hook_scaler(self, updates: Updates) -> None:
        """An update that the scaler refuses is one that writes nothing. Told here, and not when ``scaler.update()`` is
        called, it has a tail like any other: a fault in there takes nothing back of what an EMA has made of it.
        """
        scaler = self._objects.scaler
        step = scaler.step

        def step_and_tell(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._asked = self._behind(optimizer)
            result = step(optimizer, *args, **kwargs)
            refused, self._asked = self._asked, None
            if refused is not None:
                updates.before_update(refused)
                updates.after_update(refused)
            return result

        scaler.step = step_and_tell

    def _behind(self, optimizer: Any) -> torch.optim.Optimizer | None:
        """The registered optimizer that this one is, or wraps: it has its parameters. None: it is somebody else's."""
        if id(optimizer) in self._registered:
            return optimizer  # type: ignore[no-any-return] # it is one of ours
        groups = getattr(optimizer, "param_groups", ())  # a scaler that is switched off takes anything with a step()
        theirs = {id(parameter) for group in groups for parameter in group["params"]}
        for each in self._objects.optimizers:
            if any(id(parameter) in theirs for group in each.param_groups for parameter in group["params"]):
                return each  # type: ignore[no-any-return]
        return None

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._carried_gradients.close()
        self._flowing.close()
        self._buckets.forget()
        if self._objects.scaler is not None:
            vars(self._objects.scaler).pop("step", None)

    # -- the window

    def begin(self, *, whole: bool = False) -> None:
        self._running.clear()  # a step that was under way may have been left by an exception
        self._asked = None
        self._samples.take()
        self._states.begin()
        self._undo = None
        self._rank_state.buffers.look(closely=self._state.kept.looks_closely)
        self._rank_state.keep()
        self._state.keep(whole=whole)
        self._carried_gradients.begin()
        self._flowing.begin()
        if not self._buckets.known:
            self._buckets.record()
        self._start = _Start(random_state(), SwitchedOn(self._kind, self._forwards), self._buckets.shares_buffers)
        if self._taken_off.names:
            self._taken_off = TakenOff.of(self._taken_off.names)

    def rollback(self, *, intact: bool = True) -> str:
        start = self._start
        self._running.clear()
        if start is None:
            return ""
        if self._undo is not None:
            self._state.restore(self._undo)
            self._undo = None
        of = self._objects
        taken = start.switches.put_back(of.models, of.optimizers, called=self._given() is None)
        self._taken_off = TakenOff.of([*self._taken_off.names, *taken])
        gradients = self._state.kept.gradients()
        self._carried_gradients.forget()
        self._flowing.forget()
        for optimizer in self._objects.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for model in self._objects.models:
            model.zero_grad(set_to_none=True)
        self._rank_state.buffers.look(closely=self._state.kept.looks_closely)
        self._rank_state.rollback()
        lost = self._state.put_back(intact=intact)
        zero(gradients)
        self._buckets.shares_buffers = start.shares_buffers
        restore_random_state(start.random)
        return lost

    def save_undo(self) -> WrittenEarly | None:
        if self._undo is None:
            self._state.kept.seal()
            self._undo = copy_tree(self._state.tree())
        return self._found_early()

    def forget(self) -> None:
        self._start = self._undo = None
        self._state.sharding.updated(self._state.kept.written)
        self._state.kept.forget()

    def changed_unasked(self) -> str:
        found = self._samples.changed()
        return "" if found is None or self._state.kept.has_copy(found.parameter) else found.name

    def settled(self) -> list[tuple[object, frozenset[str]]]:
        return self._state.kept.settled()

    def outgrown(self) -> str:
        return self._state.outgrown()

    def changed_beside(self, *, sometimes: bool = False, elsewhere: Sequence[str] = ()) -> tuple[str, ...]:
        if elsewhere:
            return tuple(filter(self._unregistered.stands_here, elsewhere))
        return self._unregistered.changed(sometimes=sometimes)

    # -- the layout of DDP's buckets

    def gradients_ready(self, update: int) -> WrittenEarly | None:
        self._state.kept.look()
        self._rank_state.buffers.look(closely=self._state.kept.looks_closely)
        if not self._buckets.known:
            self._buckets.recorded(update)
        return self._found_early()

    def _found_early(self) -> WrittenEarly | None:
        """Asked before the first optimizer of the window writes; with ``undo`` once more when the last one has."""
        found, lost = self._state.kept.found(), self._states.written()
        hooks, self._taken_off = self._taken_off.for_good(), TakenOff()
        return (found or WrittenEarly([], 0))._replace(lost=lost, hooks=hooks) if lost or hooks else found

    def layout(self, *, within: bool = False) -> bytes:
        history, kept = self._buckets.layout(), self._state.kept
        early, modes = (kept.early_parameters(), kept.early_states()), kept.modes(within=within)
        return msgspec.msgpack.encode(_Learnt(history.passes, history.shares_buffers, *early, modes))

    def rebuild_reducer(self, layout: bytes | None, commits: int, *, modes: bool = True) -> list[str]:
        learnt = None
        if layout is not None:
            try:
                learnt = msgspec.msgpack.decode(layout, type=_Learnt)
            except msgspec.MsgspecError as error:
                raise TransferError(f"what the replica has learnt in its first steps can't be read: {error}") from None
            self._state.kept.learn(learnt.parameters, learnt.states)
        self._buckets.restore(learnt, commits)
        if learnt is None or learnt.modes is None:
            return []
        if not modes:
            return self._state.kept.otherwise(learnt.modes)
        self._state.kept.take_modes(learnt.modes)
        return []

    # -- optimizers

    def check_collective(self, verb: str) -> None:
        """A collective is called. Raises UsageError if an optimizer does it by itself."""
        if self._running:
            name = type(self._running[-1]).__qualname__
            raise UsageError(
                f"{name}.step() called {verb}: an optimizer that communicates by itself can't be recovered, because a "
                "fault in there leaves ranks with different halves of its update, and what it keeps of the exchange is "
                "in no replica; use one that only writes to its own rank's parameters (undo=True does not help here). "
                "A hook of the step that communicates may stand in front of it (register_step_pre_hook), or its call "
                "behind the step"
            )

    def _check_flow(self, optimizer: torch.optim.Optimizer) -> None:
        self._carried_gradients.check(optimizer)
        self._flowing.check()

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        sizes = _sizes(optimizer)
        if sizes == self._registered[id(optimizer)]:
            return
        strange = stranger(optimizer, {id(each) for model in self._objects.models for each in model.parameters()})
        if strange is not None:
            raise UsageError(f"{type(optimizer).__qualname__} {strange}: {HOW_TO_REGISTER}")
        if is_zero(optimizer):
            raise UsageError(
                f"{type(optimizer).__qualname__} has got another group of parameters in the loop, so that its parts "
                "are others, which can't be recovered: give it all groups in front of the Session"
            )
        self._registered[id(optimizer)] = sizes

    def _with_closures(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = tuple(self._users(each) if callable(each) else each for each in args[1:])
        return (args[0], *own), {key: self._users(each) if callable(each) else each for key, each in kwargs.items()}

    def _users(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure; what it calls is not the optimizer's doing."""

        def call(*args: Any, **kwargs: Any) -> Any:
            running, self._running = self._running, []
            try:
                result = closure(*args, **kwargs)
            finally:
                self._running = running
            if running:
                self._check_flow(running[-1])
            self._behind_closure()
            return result

        return call

    def _refuse_wrapper(self, wrapper: torch.nn.Module, _name: str, wrapped: torch.nn.Module | None) -> None:
        """A module is given another one; DDP is so by its constructor. The loop has begun."""
        if not isinstance(wrapper, DistributedDataParallel) or wrapped is None:
            return
        theirs = {id(parameter) for parameter in wrapped.parameters()}
        if any(id(parameter) in theirs for model in self._objects.models for parameter in model.parameters()):
            raise UsageError(
                f"{line()}: DistributedDataParallel wraps a registered model in the loop: a fault would leave what it "
                "averages half-done, and a new process would go on with the wrapper that is registered; make one in "
                "front of the Session, with find_unused_parameters=True for parameters that are trained later, and "
                "evaluate with what it wraps (ddp.module)"
            )

    def _refuse_foreign(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._registered or id(optimizer) in self._writing or self._running:
            return
        groups = len(optimizer.param_groups)
        if self._harmless.get(optimizer) == groups:
            return
        inner = next((each for each in held_optimizers(optimizer) if id(each) in self._registered), None)
        if inner is not None:  # what it writes by itself is seen as what the script writes
            self._harmless[optimizer] = groups
            if config.is_first_rank():
                say_aside(
                    f"{_kind(optimizer)} steps the registered {_kind(inner)}, and is not registered itself: what it "
                    "keeps from one step to the next (slow weights, as Lookahead does; SAM keeps nothing) is lost with "
                    "a process, and comes back from nowhere; keep such in the `state` of the registered one"
                )
            return
        theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._objects.models:
            for name, parameter in model.named_parameters():
                if id(parameter) in theirs:
                    raise UsageError(
                        f"{_kind(optimizer)} is about to update {name!r} of the registered model, and is "
                        "not registered itself: nothing of its updates could be recovered; register the optimizer "
                        "that steps, Session(optimizer=...)"
                    )
        self._harmless[optimizer] = groups


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__qualname__


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
