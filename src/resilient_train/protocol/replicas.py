"""Which ranks hold bit-identical copies of which shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from resilient_train.errors import ConfigError
from resilient_train.protocol.messages import Started


class ReplicaTable:
    """Replica groups of a job: every rank is in exactly one, and the members of one hold the same bits.

    Pure data parallel is the single group of all ranks; two shards on four ranks are ``[[0, 2], [1, 3]]``.
    Raises ConfigError if the groups do not cover the world exactly once.
    """

    def __init__(self, world_size: int, groups: Sequence[Sequence[int]] = ()) -> None:
        self.groups = tuple(tuple(group) for group in groups) or (tuple(range(world_size)),)
        members = sorted(rank for group in self.groups for rank in group)
        if members != list(range(world_size)):
            missing = sorted(set(range(world_size)) - set(members))
            foreign = sorted(set(members) - set(range(world_size)))
            twice = sorted({rank for rank in members if members.count(rank) > 1})
            wrong = [f"rank {missing} in none"] * bool(missing)
            wrong += [f"rank {foreign} not in a world of {world_size}"] * bool(foreign)
            wrong += [f"rank {twice} in more than one"] * bool(twice)
            raise ConfigError(
                f"replica groups {list(map(list, self.groups))} leave a shard uncovered: {'; '.join(wrong)}"
            )

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks, itself included, that hold what ``rank`` holds."""
        return next(group for group in self.groups if rank in group)

    def assign_sources(self, empty: Iterable[int], holders: Iterable[int]) -> dict[int, int]:
        """For each rank without state a holder of its shard, the load spread evenly.

        A rank whose shard no holder has is missing from the result.
        """
        return assign_sources(self.groups, empty, set(holders), {})


def assign_sources(
    groups: Collection[Sequence[int]], empty: Iterable[int], holders: Collection[int], load: dict[int, int]
) -> dict[int, int]:
    """See ReplicaTable. ``load``: how many each holder gives to already; it is counted on."""
    sources: dict[int, int] = {}
    for rank in sorted(empty):
        peers = next(group for group in groups if rank in group)
        candidates = [peer for peer in peers if peer in holders]
        if candidates:
            source = min(candidates, key=lambda peer: (load.get(peer, 0), peer))
            load[source] = load.get(source, 0) + 1
            sources[rank] = source
    return sources


def alike(fingerprints: Iterable[int]) -> bool:
    """Whether replicas with these fingerprints hold the same, as far as it is known; 0: not known."""
    return len(set(fingerprints) - {0}) < 2


def disagreeing(groups: Iterable[Sequence[int]], fingerprints: Mapping[int, int]) -> list[int]:
    """The first replica group in which two ranks hold different things; empty if there is none."""
    for group in groups:
        if not alike(fingerprints.get(rank, 0) for rank in group):
            return list(group)
    return []


def agreed(started: Mapping[int, Started]) -> ReplicaTable:
    """The replica groups of a job whose ranks have all come to their first step. Raises ConfigError if they differ, or
    the replicas do.
    """
    first = started[0]
    odd = [rank for rank, start in started.items() if start.replicas != first.replicas]
    if odd:
        raise ConfigError(f"ranks {odd} gave other replica groups than rank 0")
    table = ReplicaTable(len(started), first.replicas)
    for group in table.groups:
        digests = {started[rank].digest for rank in group}
        if len(digests) > 1:
            raise ConfigError(
                f"ranks {list(group)} are replicas of one another, but their model or optimizer state differs at the "
                "start: wrap the model in DistributedDataParallel, or broadcast it, before the first step; where each "
                "has a part of its own (stages of a pipeline), say which ranks hold the same: Session(replicas=[...])"
            )
    return table
