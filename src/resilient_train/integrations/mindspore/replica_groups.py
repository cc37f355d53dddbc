"""Which ranks hold the same state, so that one of them saves it for all."""

from __future__ import annotations

from typing import NamedTuple

from mindspore import context, nn
from mindspore.communication import GlobalComm, get_group_size, get_rank

from resilient_train.errors import ConfigError
from resilient_train.integrations.mindspore.ttp_directory import Groups


class Ranks(NamedTuple):
    """This process's place among the others."""

    rank: int
    world_size: int


def own_ranks(rank: int | None, world_size: int | None) -> Ranks:
    """As given, or as MindSpore's communication has it: rank 0 of 1 where that is not initialized.

    Raises ConfigError.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("FaultTolerance: give both rank and world_size, or neither")
    if rank is None or world_size is None:
        return Ranks(get_rank(), get_group_size()) if GlobalComm.INITED else Ranks(0, 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"FaultTolerance: rank {rank} of {world_size}")
    return Ranks(rank, world_size)


def check_groups(groups: Groups, world_size: int) -> None:
    """Raises ConfigError unless each rank is in one group."""
    if sorted(rank for group in groups for rank in group) != list(range(world_size)):
        raise ConfigError(f"replica_groups {groups}: each of the ranks 0 to {world_size - 1} must be in one group")


def found_groups(network: nn.Cell, world_size: int) -> tuple[Groups, str]:
    """The groups, and why they are so. Where it is not known that ranks hold the same, each is a group of its own."""
    alone = tuple((rank,) for rank in range(world_size))
    mode = context.get_auto_parallel_context("parallel_mode")
    if world_size == 1:
        return alone, "there is one rank"
    if mode != "data_parallel":
        return alone, f"parallel_mode is {mode}: give replica_groups if ranks hold the same"
    if context.get_auto_parallel_context("enable_parallel_optimizer"):
        return alone, "enable_parallel_optimizer: each rank has a part of the optimizer's state"
    own = [name for name, cell in network.cells_and_names() if type(cell).__name__.startswith("BatchNorm")]
    if own:
        return alone, f"{own[0]} has running means, which are each rank's own"
    return (tuple(range(world_size)),), "parallel_mode is data_parallel"
