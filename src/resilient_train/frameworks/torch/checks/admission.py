"""Which models and optimizers a Session takes. What a replica could not hand on bit for bit is refused before training.

An optimizer shows its state in two places: ``state`` and ``param_groups``. Whatever it keeps elsewhere (in an optimizer
that it wraps, on another rank) would be missing in a process that replaces a lost one, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from resilient_train.errors import ConfigError
from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.kept.optimizer_groups import parameters_of
from resilient_train.frameworks.torch.sharding.sharded import Sharding, is_a
from resilient_train.frameworks.torch.sharding.zero import check as check_zero
from resilient_train.frameworks.torch.sharding.zero import is_zero, stepping
from resilient_train.frameworks.torch.tensors.extra_state import with_extra_state
from resilient_train.frameworks.torch.tensors.leaves import is_sharded


def check(objects: Objects) -> None:
    """Raises ConfigError for the first thing that can't be taken, and says why."""
    Sharding(objects.models).reshard()  # a forward pass alone leaves whole tensors in the places of parameters
    for model in objects.models:
        _check_model(model)
    if told := goes_on(objects.models):
        raise ConfigError(told)
    for optimizer in objects.optimizers:
        _check_optimizer(optimizer)
    registered = {id(parameter) for model in objects.models for parameter in model.parameters()}
    for optimizer in objects.optimizers:
        strange = stranger(optimizer, registered)
        if strange is not None:
            raise ConfigError(f"optimizer: {_name(optimizer)} {strange}: {HOW_TO_REGISTER}")


_GOES_ON = ("PowerSGDState", "PostLocalSGDState")
"""torch's states of communication hooks; they have no ``state_dict()``."""
HOW_TO_REGISTER = "register the module that holds it too, Session(model=[...])"


def stranger(optimizer: torch.optim.Optimizer, registered: set[int]) -> str | None:
    """Says which parameter of the optimizer is none of the ``registered`` ones, by id; None if there is no such."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in registered:
                return (
                    f"updates a parameter of shape {tuple(parameter.shape)} (group {number}) that is in no registered "
                    "model, so its value could not be given to a new process"
                )
    return None


def trained_of(models: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that an optimizer is to update: not torch's average of another one, though its parameters say so."""
    return [model for model in models if not isinstance(model, torch.optim.swa_utils.AveragedModel)]


def without_optimizer(objects: Objects) -> list[str]:
    """The names of trained parameters that no registered optimizer updates."""
    theirs = {id(parameter) for optimizer in objects.optimizers for parameter in parameters_of(optimizer)}
    named = (each for model in trained_of(objects.models) for each in model.named_parameters())
    return [name for name, parameter in named if parameter.requires_grad and id(parameter) not in theirs]


def goes_on(models: Iterable[torch.nn.Module]) -> str:
    """What of communication hooks can't be put back; empty: nothing. Asked again when the loop begins: a hook may be
    registered behind the Session, and its state may lie in an attribute of another one.
    """
    for model in models:
        for name, module in model.named_modules():
            for state in _near(each for hook in getattr(module, "_comm_hooks", ()) for each in hook):
                if any(is_a(state, kind) for kind in _GOES_ON):
                    return (
                        f"model: {name or type(model).__qualname__!r} has a communication hook with a "
                        f"{type(state).__qualname__}, which goes on from step to step and can't be put back after a "
                        "fault: leave that hook out"
                    )
    return ""


def reads_in_cpp(models: Iterable[torch.nn.Module]) -> str:
    """Which model has torch's own FP16 hook; empty: none. That reads what comes of a collective in C++, as a list of
    tensors, and a work that can be left (``guarded_works.py``) is completed from Python. DDP doesn't list it.
    """
    for model in models:
        for name, module in model.named_modules():
            told: Any = module._get_ddp_logging_data() if isinstance(module, DistributedDataParallel) else {}  # type: ignore[no-untyped-call] # torch's
            if "FP16_COMPRESS" in told.get("comm_hook", ""):
                return (
                    f"model: {name or type(model).__qualname__!r} has torch's built-in FP16_COMPRESS as its "
                    "communication hook, which a group that is rebuilt after a fault can't serve: "
                    "register_comm_hook(None, default_hooks.fp16_compress_hook) gives the same bits"
                )
    return ""


def _near(things: Iterable[Any]) -> Iterator[Any]:
    """And what these hold by name: attributes, the arguments of a partial function, what a function names."""
    for each in things:
        yield each
        yield from getattr(each, "__dict__", {}).values()
        if isinstance(each, partial):
            yield from (each.func, *each.args, *each.keywords.values())
        if isinstance(each, MethodType):
            yield from (each.__self__, *getattr(each.__self__, "__dict__", {}).values())
        if isinstance(each, FunctionType):
            with suppress(ValueError):  # a variable of a closure that has no value yet
                named = getclosurevars(each)
                yield from (*named.nonlocals.values(), *named.globals.values())


def cast_once(models: Iterable[torch.nn.Module]) -> str:
    """That ``torch.autocast`` is around the loop, which then trains on the first casts of its weights; empty: not."""
    trained = (each for model in models for each in model.parameters() if each.requires_grad)
    kinds = {each.device.type for each in trained if each.dtype is torch.float32 and each.is_leaf}
    if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, kinds)):
        return (
            "torch.autocast is around the loop: it keeps what it has cast until it is left, so no forward pass sees an "
            "update, and a process that takes a place casts other weights; put it around the forward pass, or give it "
            "cache_enabled=False"
        )
    return ""


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model: {type(model).__qualname__} is no torch.nn.Module")
    for name, module in model.named_modules():
        if is_a(module, "FullyShardedDataParallel"):
            raise ConfigError(
                f"model: {name or type(model).__qualname__!r} is wrapped by FullyShardedDataParallel, whose parameters "
                "are flattened and can't be recovered: use fully_shard (torch.distributed.fsdp) instead"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"model: {name or type(model).__qualname__!r} is a module of torch.jit, whose parameters and buffers "
                "can't be put back one by one: use torch.compile, or keep it out of the model if it is not trained"
            )
    for name, module in with_extra_state(model):
        if type(module).set_extra_state is torch.nn.Module.set_extra_state:
            raise ConfigError(
                f"model: {name or type(model).__qualname__!r} has get_extra_state() and no set_extra_state(): what it "
                "gives could not be put back after a fault; write the other method too"
            )
    for name, parameter in model.named_parameters():
        _check_tensor("parameter", name, parameter)
    for name, buffer in model.named_buffers():
        _check_tensor("buffer", name, buffer)


def _check_tensor(kind: str, name: str, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise ConfigError(
            f"model: {kind} {name!r} has no shape yet (its module is a lazy one): run one forward pass before "
            "the optimizer and the Session are made"
        )
    if tensor.is_meta:
        raise ConfigError(
            f"model: {kind} {name!r} is on the meta device, and holds nothing that could be carried: give it "
            "memory (to_empty()), or leave it out of the model"
        )
    if kind == "buffer" and is_sharded(tensor):
        raise ConfigError(f"model: buffer {name!r} is a DTensor, which can't be recovered: keep it as a plain tensor")
    if hasattr(tensor, "_st_info"):
        raise ConfigError(
            f"model: parameter {name!r} is this rank's part of a DTensor, which DistributedDataParallel has "
            "taken out of its tensor and puts back in each forward pass; that can't be recovered: use "
            "fully_shard or replicate (torch.distributed._composable.replicate_with_fsdp) beside "
            "parallelize_module"
        )
    if tensor.is_quantized:
        raise ConfigError(
            f"model: {kind} {name!r} is a quantized tensor, whose scale is not in its memory: register "
            "int_repr(), scale and zero point as buffers, or keep it as a plain attribute if it is always the "
            "same"
        )
    if kind == "buffer" and tensor.layout is not torch.strided:
        raise ConfigError(
            f"model: buffer {name!r} is a sparse tensor, and nobody would see that it changes: register its "
            "indices and its values as two buffers, or keep it as a plain attribute if it is always the same"
        )


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: {type(optimizer).__qualname__} is no torch.optim.Optimizer")
    if is_zero(optimizer):
        check_zero(optimizer)
        optimizer = stepping(optimizer)
    for inner in held_optimizers(optimizer):
        if inner.state is not optimizer.state:
            raise ConfigError(
                f"optimizer: {_name(optimizer)} wraps an optimizer ({_name(inner)}) whose state is not in its own, so "
                f"a new process would start without it: register the {_name(inner)} instead, if the wrapper itself "
                "keeps nothing from step to step (as SAM does); else keep all of it in the `state` of one optimizer"
            )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") or not getattr(type(optimizer).step, "hooked", False):
        raise ConfigError(
            f"optimizer: {_name(optimizer)} does not run the hooks of torch.optim.Optimizer.step, so its updates can't "
            "be seen: call Optimizer.__init__ in its constructor, or register the optimizer that it wraps"
        )
    beside = sorted(set(optimizer.state_dict()) - {"state", "param_groups"})
    if beside:
        raise ConfigError(
            f"optimizer: {_name(optimizer)} keeps {', '.join(map(repr, beside))} beside `state` and `param_groups`, "
            "where a new process would not be given it: keep it in `state`"
        )


def held_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Those that it wraps."""
    for value in vars(optimizer).values():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for item in items:
            if isinstance(item, torch.optim.Optimizer) and item is not optimizer:
                yield item


def _name(thing: object) -> str:
    return type(thing).__qualname__
