"""torch's ``ZeroRedundancyOptimizer`` (ZeRO-1): each rank updates its part of the parameters, and tells the others.

Its ``step()`` has another optimizer (``optim``) write this rank's part, and broadcasts that behind it. So there are
two: ``optim`` is the one whose updates are seen, and they are local, as any other's; the broadcasts are collectives
behind an update, and are finished after a fault from what each rank has published of them (``tail_collectives.py``). To
everybody else a ``ZeroOptimizer`` shows one: with all parameters and settings, which are the outer one's, and with the
state of this rank's part, which no other rank has. So each rank is its own replica group, and when one is lost all go
back.

Of what is saved each rank has the state of its part and the parameters that it updates; together they are what one
optimizer of all parameters would have saved (decision 54).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from resilient_train.errors import ConfigError, LayoutError
from resilient_train.frameworks.torch.sharding.sharded import Replicas, is_a
from resilient_train.frameworks.torch.tensors.leaves import is_sharded

_ENTRY_BYTES = 1 << 10
"""What a logged call takes besides what is given to it, at most: its header, and the name of its group."""
_MIB = 1 << 20


def is_zero(optimizer: object) -> bool:
    """Whether it is one of these."""
    return is_a(optimizer, "ZeroRedundancyOptimizer")


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose ``step()`` writes when this one's is called; nearly always itself."""
    writes: torch.optim.Optimizer = optimizer.optim if is_zero(optimizer) else optimizer  # type: ignore[attr-defined]
    return writes


def check(optimizer: Any) -> None:
    """Raises ConfigError for one that can't be recovered."""
    if optimizer._overlap_with_ddp:
        raise ConfigError(
            "optimizer: ZeroRedundancyOptimizer(overlap_with_ddp=True) updates within the backward pass, where a fault "
            "would leave ranks with different halves of an update: leave it out"
        )
    if dist.get_world_size(optimizer.process_group) != dist.get_world_size():
        raise ConfigError(
            "optimizer: ZeroRedundancyOptimizer is made over a process group of some of the ranks, which can't be "
            "recovered: make it over all of them"
        )
    if any(map(is_sharded, _parameters(optimizer.param_groups))):
        raise ConfigError(
            "optimizer: ZeroRedundancyOptimizer is given parameters that are divided among ranks already, which can't "
            "be recovered: use the optimizer that it was made of"
        )


class ZeroOptimizer:
    """A ZeroRedundancyOptimizer, as far as its state is concerned: like a ``torch.optim.Optimizer``."""

    def __init__(self, outer: Any) -> None:
        self._outer = outer
        self._parts: list[list[torch.Tensor]] = [list(_parameters(part)) for part in outer._partition_parameters()]
        self._own = set(map(id, self._parts[outer.rank]))
        for settings, own in zip(outer.param_groups, outer.optim.param_groups, strict=True):
            for name, value in own.items():  # what the first step would add: a new process is given all of them
                settings.setdefault(name, value)

    @property
    def state(self) -> Any:
        """Of this rank's part."""
        return self._outer.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all parameters. Their settings are handed to the part's optimizer by the next ``step()``."""
        groups: list[dict[str, Any]] = self._outer.param_groups
        return groups

    def regroup(self, wanted: Sequence[Sequence[torch.Tensor]]) -> None:
        """Raises LayoutError for groups of other parameters than there are: the parts would be others."""
        held = [list(map(id, group["params"])) for group in self.param_groups]
        if held != [list(map(id, group)) for group in wanted]:
            raise LayoutError(
                "the parameters of a ZeroRedundancyOptimizer are in other groups there than here, so its parts are "
                "others: the script has to make it as it did, and add_param_group() can't be recovered"
            )

    def reattach(self) -> None:
        """Parameters may lie in memory of before: where they are views of one tensor, that is broadcast. It was made
        anew if others were frozen in a step that is taken back.
        """
        outer = self._outer
        if not outer.parameters_as_bucket_view:
            return
        held = {bucket.untyped_storage().data_ptr() for buckets in outer._buckets for bucket in buckets}
        trained = [each for each in outer._all_params if each.requires_grad]
        mask = outer._get_is_trainable_mask()
        if mask != outer._is_trainable_mask or any(each.untyped_storage().data_ptr() not in held for each in trained):
            outer._build_param_buckets()
            outer._is_trainable_mask = mask

    def owners(self) -> Iterator[tuple[int, int]]:
        """The ``id`` of each parameter, and which rank updates it."""
        for member, part in enumerate(self._parts):
            rank = dist.get_global_rank(self._outer.process_group, member)
            yield from ((id(parameter), rank) for parameter in part)

    def updates(self, parameter: torch.Tensor) -> bool:
        """Whether this rank does."""
        return id(parameter) in self._own

    def logged_bytes(self) -> int:
        """How much the rank with the most publishes of the broadcasts of one ``step()``."""
        sizes = [sum(each.numel() * each.element_size() for each in part) for part in self._parts]
        return max(sizes) + _ENTRY_BYTES * sum(map(len, self._parts))


def _parameters(groups: Iterable[dict[str, Any]]) -> Iterator[torch.Tensor]:
    return (parameter for group in groups for parameter in group["params"])


def shown(optimizer: torch.optim.Optimizer) -> Any:
    """What all but the loop deals with in its place."""
    return ZeroOptimizer(optimizer) if is_zero(optimizer) else optimizer


class ZeroParts:
    """Who holds what of the registered optimizers that are divided; nothing, where none is."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._zeros = {number: each for number, each in enumerate(optimizers) if isinstance(each, ZeroOptimizer)}
        self._owners = dict(owner for each in self._zeros.values() for owner in each.owners())

    def replicas(self, log_bytes: int) -> Replicas:
        """Each rank alone; () if nothing is divided. ``log_bytes``: what a tail may publish. Raises ConfigError if the
        broadcasts behind an update are more: a fault in there would end the job.
        """
        if not self._zeros:
            return ()
        needed = sum(each.logged_bytes() for each in self._zeros.values())
        if needed > log_bytes:
            raise ConfigError(
                f"optimizer: ZeroRedundancyOptimizer broadcasts up to {needed} bytes a rank behind each update, and "
                f"RESILIENT_TAIL_LOG_BYTES keeps {log_bytes}, without which a cut connection there ends the job: set "
                f"it to {-(-needed // _MIB) + 4 << 20}"
            )
        return tuple((rank,) for rank in range(dist.get_world_size()))

    def __bool__(self) -> bool:
        return bool(self._zeros)

    def reattach(self) -> None:
        """See ``ZeroOptimizer``."""
        for each in self._zeros.values():
            each.reattach()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the optimizers that are divided."""
        return tuple(self._zeros)

    def division(self, models: Sequence[Mapping[str, torch.Tensor]]) -> str:
        """Which rank updates which parameter, as a digest; the same on all ranks."""
        named = (each for model in models for each in model.items())
        return xxhash.xxh3_64_hexdigest("\n".join(f"{name} {self.owner(each)}" for name, each in named).encode())

    def owner(self, tensor: torch.Tensor) -> int | None:
        """The rank that updates this parameter; None if that is none's part alone."""
        return self._owners.get(id(tensor))

    def saver(self, name: str, tensor: torch.Tensor) -> int | None:
        """The rank that saves a tensor of the state for all of them; None: each has one of its own.

        A parameter is saved by who updates it; so is what an optimizer keeps beside it, which no other rank has.
        Buffers by the first, as where nothing is divided: what a rank has of its own in them it publishes.
        """
        kind, number, key = (*name.split(".", 3), "", "")[:3]
        if kind == "buffers":
            return 0
        if kind == "model":
            return self.owner(tensor)
        beside = kind == "optimizer" and key.isdecimal() and int(number) in self._zeros
        return dist.get_rank() if beside else None
