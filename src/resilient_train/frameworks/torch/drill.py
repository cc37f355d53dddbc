"""Faults on request, and a look at all of the state: see ``frameworks/roles.Drill``."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from resilient_train.errors import StateError
from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.checkpoint import names_of
from resilient_train.frameworks.torch.device import Device
from resilient_train.frameworks.torch.fingerprint import tensor_digest
from resilient_train.frameworks.torch.generators import by_generator, random_state
from resilient_train.frameworks.torch.groups import Groups
from resilient_train.frameworks.torch.leaves import TENSORS, state_of
from resilient_train.frameworks.torch.state import State
from resilient_train.state.tree import flatten


class Drill:
    """``device`` reports what is poisoned."""

    def __init__(self, objects: Objects, groups: Groups, device: Device, state: State) -> None:
        self._objects = objects
        self._groups = groups
        self._device = device
        self._state = state
        self._hooks: list[Any] = []

    def cut(self) -> None:
        for descriptor, _ in self._groups.sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)  # gloo may have closed it over another fault

    def poison(self, target: str) -> None:
        parameters = self._trained()
        middle = parameters[len(parameters) // 2]
        state = self._objects.optimizers[0].state.get(middle, {})
        moments = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        buffers = [b for model in self._objects.models for b in model.buffers() if b.dim()]
        victims = {"optimizer": moments, "buffer": buffers, "gradient": [middle.grad], "param": [middle.data]}
        found = [tensor for tensor in victims.get(target, []) if tensor is not None]
        # An activation belongs to nobody that the Session knows; so does what this step does not have (a gradient).
        self._device.poison(found[0] if found else torch.zeros(64))
        raise RuntimeError(f"UCE ERROR (injected: {target}), error code is 507053")

    def call_in_forward(self, call: Callable[[], None]) -> None:
        leaves = [m for model in self._objects.models for m in model.modules() if not any(m.children())]
        self._hooks.append(leaves[len(leaves) // 2].register_forward_hook(lambda *_: call()))

    def call_in_backward(self, call: Callable[[], None]) -> None:
        parameters = self._trained()
        middle = parameters[len(parameters) // 2]
        self._hooks.append(middle.register_post_accumulate_grad_hook(lambda _: call()))  # type: ignore[no-untyped-call] # torch's

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for model in self._objects.models for p in model.parameters() if p.requires_grad]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def parts(self, more: Mapping[str, Any]) -> dict[str, str]:
        """What a tree holds beside its tensors has one digest under the tree's own name.

        Of ``more`` a tree that holds what can't be carried is left out: a batch may be anything.
        """
        tree = self._state.tree()
        trees = {name: tree[name] for name in ("model", "optimizer", "members", "buffers")}
        trees |= {f"settings.{name}": part for name, part in tree["small"].items()}
        trees |= {f"state.{name}": part for name, part in tree["extra"].items()}
        trees |= {f"rank_state.{name}": state_of(thing) for name, thing in self._objects.rank_extra.items()}
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


def _digests(name: str, tree: Any) -> dict[str, str]:
    payload, tensors = flatten(tree, TENSORS)
    names = names_of((name, *(path or ("tensor",))) for path in tensors)
    found = {full: tensor_digest(tensor) for full, tensor in zip(names, tensors.values(), strict=True)}
    return {name: xxhash.xxh3_64_hexdigest(payload), **found}
