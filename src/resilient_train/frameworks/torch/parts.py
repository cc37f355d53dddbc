"""A digest of its own for each tensor and each other part of a rank's state, so that a difference can be named.

Only a drill asks for it: at the head of every step all of the state is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from resilient_train.errors import StateError
from resilient_train.frameworks.torch.checkpoint import names_of
from resilient_train.frameworks.torch.fingerprint import tensor_digest
from resilient_train.frameworks.torch.generators import by_generator, random_state
from resilient_train.frameworks.torch.leaves import TENSORS
from resilient_train.frameworks.torch.replicated import Replicated, state_of
from resilient_train.state.tree import flatten


def parts(replicated: Replicated, rank_extra: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, str]:
    """Name -> digest. What a tree holds beside its tensors has one digest under the tree's own name.

    Of ``more`` a tree that holds what can't be carried is left out: a batch may be anything.
    """
    tree = replicated.tree()
    trees = {name: tree[name] for name in ("model", "optimizer", "members", "buffers")}
    trees |= {f"settings.{name}": part for name, part in tree["small"].items()}
    trees |= {f"state.{name}": part for name, part in tree["extra"].items()}
    trees |= {f"rank_state.{name}": state_of(thing) for name, thing in rank_extra.items()}
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
