"""Faults on request, and a look at all of the state: see ``frameworks/roles.Drill``."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from resilient_train.errors import ConfigError, StateError
from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.device import TorchDevice
from resilient_train.frameworks.torch.groups import TorchGroups, nccl_groups
from resilient_train.frameworks.torch.kept.generators import by_generator, random_state
from resilient_train.frameworks.torch.kept.kept_state import LIVES_ON
from resilient_train.frameworks.torch.state import TorchState
from resilient_train.frameworks.torch.tensors.checkpoint_pieces import names_of
from resilient_train.frameworks.torch.tensors.extra_state import ExtraState
from resilient_train.frameworks.torch.tensors.fingerprint import tensor_digest
from resilient_train.frameworks.torch.tensors.leaves import TENSORS, gradients_of, local, state_of
from resilient_train.state.tree import flatten

_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class TorchDrill:
    """``device`` reports what is poisoned."""

    def __init__(self, objects: Objects, groups: TorchGroups, device: TorchDevice, state: TorchState) -> None:
        self._objects = objects
        self._groups = groups
        self._device = device
        self._state = state
        self._hooks: list[Any] = []
        self._computed: tuple[str, torch.Tensor] | None = None
        """What has just come of a layer, or of a parameter, while ``call_in_forward`` or ``call_in_backward`` calls."""

    def cut(self) -> None:
        for descriptor, _ in self._groups.sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)  # gloo may have closed it over another fault
        for group in nccl_groups():
            group.abort_communicators()

    def poison(self, target: str) -> None:
        parameters = self._trained()
        middle = parameters[len(parameters) // 2]
        state = self._objects.optimizers[0].state.get(middle, {})
        moments = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        buffers = [b for model in self._objects.models for b in model.buffers() if b.dim()]
        victims = {"optimizer": moments, "buffer": buffers, "gradient": [middle.grad], "param": [middle.data]}
        found = [tensor for tensor in victims.get(target, []) if tensor is not None]
        # An activation belongs to nobody that the Session knows; so does what this step does not have (a gradient).
        self._device.poison(found[0] if found else torch.zeros(64, device="cpu"))
        raise RuntimeError(f"UCE ERROR (injected: {target}), error code is 507053")

    def flip(self, target: str, index: int, mask: int) -> dict[str, object]:
        found = self._named(target)
        left = index % max(1, sum(tensor.numel() for _, tensor in found))
        for name, tensor in found:
            if left < tensor.numel():
                return {"target": target, "tensor": name, "index": left, **_invert(local(tensor), left, mask)}
            left -= tensor.numel()
        raise ConfigError(f"fault plan: flip target={target}: this step has no {target}")

    def _named(self, target: str) -> list[tuple[str, torch.Tensor]]:
        """The tensors of that kind, in one order on all ranks."""
        if self._computed is not None or target == "activation":  # other gradients are not there yet, or not any more
            return [self._computed] if self._computed is not None else []
        if target == "gradient":
            return gradients_of(self._objects.models)
        tree = self._state.tree()
        part = {"param": "model", "optimizer": "optimizer", "buffer": "buffers"}[target]
        _, tensors = flatten(tree[part], TENSORS)
        return list(zip(names_of(tensors), tensors.values(), strict=True))

    def call_in_forward(self, call: Callable[[], None]) -> None:
        def hook(module: torch.nn.Module, _arguments: Any, output: Any) -> None:
            found = isinstance(output, torch.Tensor)
            self._call_with((f"output of {type(module).__name__}", output) if found else None, call)

        self._hook_middle(hook)

    def call_in_backward(self, call: Callable[[], None]) -> None:
        if self._state.sharding:
            self._call_behind_output(call)
            return
        parameters = self._trained()
        middle = parameters[len(parameters) // 2]

        def hook(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            self._call_with(("middle parameter", gradient) if gradient is not None else None, call)

        self._hooks.append(middle.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call] # torch's

    def _call_behind_output(self, call: Callable[[], None]) -> None:
        """A parameter that is divided has no gradient where nothing is reduced (``set_requires_gradient_sync``)."""

        def hook(module: torch.nn.Module, _arguments: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                name = f"gradient of the output of {type(module).__name__}"
                output.register_hook(lambda gradient: self._call_with((name, gradient), call))  # type: ignore[no-untyped-call] # torch's

        self._hook_middle(hook)

    def _hook_middle(self, hook: Callable[[torch.nn.Module, Any, Any], None]) -> None:
        """Behind the middle leaf; where nobody calls that (the ``out_proj`` of torch's attention), behind the innermost
        part around it that is called.
        """
        leaf, *around = self._middle()
        ran = False

        def begin(_module: torch.nn.Module, _arguments: Any) -> None:
            nonlocal ran
            ran = False

        def behind(module: torch.nn.Module, arguments: Any, output: Any) -> None:
            nonlocal ran
            if module is leaf or not ran:
                ran = True
                hook(module, arguments, output)

        self._hooks += [each.register_forward_pre_hook(begin) for each in around]
        self._hooks += [each.register_forward_hook(behind) for each in (leaf, *around)]

    def _middle(self) -> list[torch.nn.Module]:
        """The middle leaf and what it lies in, outwards. Of the leaves that are trained, if any are: what comes of
        others may have no gradient.
        """
        leaves = [
            (model, name, module)
            for model in self._objects.models
            for name, module in model.named_modules()
            if next(module.children(), None) is None  # a module may have a length, or refuse to say it
        ]
        trained = [each for each in leaves if any(parameter.requires_grad for parameter in each[2].parameters())]
        updated = self._updated()
        found = [each for each in trained if any(id(parameter) in updated for parameter in each[2].parameters())]
        found = found or trained or leaves
        model, name, leaf = found[len(found) // 2]
        parts = name.split(".") if name else []
        inwards = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts))]
        return _not_compiled([*inwards, leaf])[::-1]

    def _updated(self) -> set[int]:
        """The parameters of optimizers, by id. An average of weights, or a target network, is a model without."""
        groups = (group for optimizer in self._objects.optimizers for group in optimizer.param_groups)
        return {id(parameter) for group in groups for parameter in group["params"]}

    def _call_with(self, computed: tuple[str, torch.Tensor] | None, call: Callable[[], None]) -> None:
        self._computed = computed
        try:
            call()
        finally:
            self._computed = None

    def _trained(self) -> list[torch.nn.Parameter]:
        """Of what is divided the parts, also while a module computes and has whole tensors in their places."""
        divided = self._state.sharding.divided
        named = (divided(dict(model.named_parameters())) for model in self._objects.models)
        trained = [parameter for each in named for parameter in each.values() if parameter.requires_grad]
        updated = self._updated()
        return [each for each in trained if id(each) in updated] or trained

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def parts(self, more: Mapping[str, Any]) -> dict[str, str]:
        """What a tree holds beside its tensors has one digest under the tree's own name.

        Left out is, of ``more``, a tree that holds what can't be carried: a batch may be anything. And what a process
        brings up to date by itself: as a step begins, a new process or one that runs it again may not have come to it.
        """
        tree = self._state.tree()
        lives_on = {name for name, thing in self._objects.extra.items() if getattr(thing, LIVES_ON, False)}
        trees = {name: tree[name] for name in ("model", "optimizer", "members", "buffers")}
        trees |= {f"settings.{name}": part for name, part in tree["small"].items()}
        trees |= {f"state.{name}": part for name, part in tree["extra"].items() if name not in lives_on}
        trees |= {f"rank_state.{name}": state_of(thing) for name, thing in self._objects.rank_extra.items()}
        trees["extra_state"] = ExtraState(self._objects.models).held()
        trees |= {f"generator.{name}": part for name, part in by_generator(random_state()).items()}
        found: dict[str, str] = {}
        for name, part in trees.items():
            found |= _digests(name, part)
        for name, part in more.items():
            try:
                found |= _digests(name, part)
            except StateError:
                continue
        return found


def _invert(tensor: torch.Tensor, index: int, mask: int) -> dict[str, object]:
    """Past autograd, which is not to know."""
    bits = 8 * tensor.element_size()
    if mask >> bits:
        raise ConfigError(f"fault plan: flip mask={mask:#x}: an element of {tensor.dtype} has {bits} bits only")
    where = torch.unravel_index(torch.tensor(index, device="cpu"), tensor.shape)
    place = tensor.data[tuple(map(int, where))]
    was = place.item()
    signed = mask - (1 << bits) if bits > 8 and mask >> (bits - 1) else mask
    place.view(_WORDS[bits]).bitwise_xor_(signed)
    return {"mask": f"{mask:#x}", "was": str(was), "is": str(place.item())}


def _digests(name: str, tree: Any) -> dict[str, str]:
    payload, tensors = flatten(tree, TENSORS)
    names = names_of((name, *(path or ("tensor",))) for path in tensors)
    found = {full: tensor_digest(tensor) for full, tensor in zip(names, tensors.values(), strict=True)}
    return {name: xxhash.xxh3_64_hexdigest(payload), **found}


def _not_compiled(inwards: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Without what lies in one that torch.compile compiles, which would compile hooks there, or refuse them
    (``fullgraph=True``). Where it is the outermost that compiles itself (``model.compile()``), all the same.
    """
    for number, module in enumerate(inwards):
        if hasattr(module, "_orig_mod"):  # torch.compile(module)
            return inwards[: number + 1]
        if getattr(module, "_compiled_call_impl", None) is not None:
            return inwards[:number] or inwards
    return inwards
