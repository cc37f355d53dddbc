"""Replicas that differ: what to tell, from what each of them holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resilient_train.protocol.messages import Differs

_UNAVERAGED = "each rank applies gradients of its own: wrap the model in DistributedDataParallel"
_ALONE = "something has changed it on one rank alone, or a machine computes otherwise"


def sentence(group: Sequence[int], told: Mapping[int, Differs]) -> str:
    """Names the first thing that differs in a replica group, and who stands against whom.

    ``told`` is what its members have said; some may have died over it.
    """
    speaking = {rank: told[rank] for rank in group if rank in told}
    commits = max(each.commits for each in speaking.values())
    why = _ALONE if all(each.averages for each in speaking.values()) else _UNAVERAGED
    found = first_difference({rank: dict(each.rows) for rank, each in speaking.items()})
    where = "their state differs"
    if found is not None:
        name, parties = found
        where = f"{name!r} differs between ranks {' and '.join(map(str, parties))}"
        if len(parties) == 2 and len(parties[0]) > len(parties[1]):
            where = f"{name!r} differs on rank {', '.join(map(str, parties[1]))}"
    return (
        f"ranks {list(group)} are to hold the same bits, but after update {commits} {where}: {why}; nothing of this is "
        "saved"
    )


def first_difference(rows: Mapping[int, Mapping[str, str]]) -> tuple[str, list[list[int]]] | None:
    """The first name under which ranks hold different things, and these ranks by what they hold, most of them first.

    None if there is no such name.
    """
    for name in dict.fromkeys(name for each in rows.values() for name in each):
        parties: dict[str | None, list[int]] = {}
        for rank, held in rows.items():
            parties.setdefault(held.get(name), []).append(rank)
        if len(parties) > 1:
            return name, sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))
    return None
