"""Replicas that differ: what to tell, from what each of them holds. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from resilient_train.protocol.messages import EXCHANGED, HOOKS, KEPT_BACK, Differs, Shared


class Doubt:
    """What replicas held before update ``commits``, where it was not the same: fingerprints, by rank. It was trained
    once more from a state that was equal. Who then holds what it held before has been right.
    """

    def __init__(self, commits: int, held: Mapping[int, int], anew: Sequence[int] = ()) -> None:
        self.commits = commits
        self.anew = tuple(anew)
        """The ranks whose processes had taken another's place by then."""
        self._before, self._now = dict(held), dict[int, int]()

    def hear(self, rank: int, held: int) -> list[int] | None:
        """One has come there again. When all have: those that were wrong; nobody, where all were, since their gradients
        are everybody's by then, or where they hold different things again.
        """
        if rank in self._before:
            self._now[rank] = held
        if self._now.keys() < self._before.keys():
            return None
        wrong = [each for each, before in self._before.items() if before != self._now[each]]
        return wrong if len(wrong) < len(self._before) and len(set(self._now.values())) == 1 else []

    def copy(self) -> Doubt:
        """An independent one in the same state."""
        new = Doubt(self.commits, self._before, self.anew)
        new._now = dict(self._now)
        return new


_UNAVERAGED = (
    "each rank applies gradients of its own: wrap the model in DistributedDataParallel (what an optimizer keeps for "
    "one rank alone, as error feedback does, belongs in rank_state=); where ranks are to differ, as in local SGD, "
    "Session(replicas=[[0], [1], ...]) says so (docs/how-to/loops.md)"
)
_ALONE = "something has changed it on one rank alone, or a machine computes otherwise"

_REPLACED = (
    "; or, since {ranks} began anew in another's place: the training depends on something that is not "
    "registered (a scheduler, a loss scale, attributes of an optimizer or of a hook), register it "
    "(docs/how-to/load-data.md)"
)


def sentence(group: Sequence[int], told: Mapping[int, Differs], replaced: Collection[int] = ()) -> str:
    """Names the first thing that differs in a replica group, and who stands against whom.

    ``told`` is what its members have said; some may have died over it. ``replaced``: ranks whose processes have taken
    another's place.
    """
    speaking = {rank: told[rank] for rank in group if rank in told}
    commits = max(each.commits for each in speaking.values())
    why = _ALONE if all(each.averages for each in speaking.values()) else _UNAVERAGED
    if new := [rank for rank in speaking if rank in replaced]:
        why += _REPLACED.format(ranks=f"rank{'s' * (len(new) > 1)} {', '.join(map(str, new))}")
    found = _difference(speaking)
    where = "their state differs"
    if found is not None:
        name, parties = found
        where = f"{name!r} differs between ranks {' and '.join(map(str, parties))}"
        if few := _minority(parties):
            where = f"{name!r} differs on rank {', '.join(map(str, few))}"
    return (
        f"ranks {list(group)} are to hold the same bits, but after update {commits} {where}: {why}; nothing of this is "
        "saved"
    )


def alone(told: Mapping[int, Differs]) -> list[int]:
    """The ranks that stand against a majority of their replicas; nobody where two stand against each other, or where
    ranks apply gradients of their own.
    """
    found = _difference(told) if all(each.averages for each in told.values()) else None
    return _minority(found[1]) if found is not None else []


def evidence(told: Mapping[int, Differs]) -> dict[str, object]:
    """For the event: the first thing that differs, and by rank its digest, that of the batch, and the device."""
    found = _difference(told)
    name = found[0] if found is not None else ""
    digests = {str(rank): dict(each.rows).get(name, "") for rank, each in told.items()}
    return {
        "name": name,
        "digests": digests if name else {},
        "batches": {str(rank): each.batch for rank, each in told.items()},
        "devices": {str(rank): each.device for rank, each in told.items()},
    }


def _difference(told: Mapping[int, Differs]) -> tuple[str, list[list[int]]] | None:
    return first_difference({rank: dict(each.rows) for rank, each in told.items()})


def _minority(parties: list[list[int]]) -> list[int]:
    return parties[1] if len(parties) == 2 and len(parties[0]) > len(parties[1]) else []


_MODULES = "model."
"""So the names of their attributes begin."""
_ANOTHERS = "a replaced rank gets that of another one"


class SharedObjects:
    """What ranks have said that they have alike (``messages.Shared``). Each name that differs is told once."""

    def __init__(self) -> None:
        self._attempt = 0
        self._said: dict[int, dict[int, dict[str, str]]] = {}
        """By rank and update. Short steps outrun the agent, which may read two words of one rank before the first of
        another: so a word stays until all of its replica group have said theirs.
        """
        self._told: set[str] = set()

    def heard(self, rank: int, said: Shared, group: Sequence[int], attempt: int) -> list[tuple[str, list[list[int]]]]:
        """What is to be told now: names, and the ranks of the replica group by what they hold. ``attempt``: what was
        said before all ranks were started again tells nothing.
        """
        if attempt != self._attempt:
            self._attempt, self._said = attempt, {}
        now = said.commits
        before = {commits: rows for commits, rows in self._said.get(rank, {}).items() if commits < now}
        self._said[rank] = {**before, now: dict(said.rows)}  # behind it: said before the rank went back to here
        if any(now not in self._said.get(other, ()) for other in group):
            return []
        rows = {other: self._said[other][now] for other in group}
        for other in group:
            self._said[other] = {commits: held for commits, held in self._said[other].items() if commits > now}
        found = []
        for name in dict.fromkeys(name for held in rows.values() for name in held):
            built = {name: ""} if name.startswith(_MODULES) else {}  # who does not say otherwise has it as built
            only = {other: {**built, name: held[name]} if name in held else built for other, held in rows.items()}
            only = {other: held for other, held in only.items() if held}
            if name not in self._told and (difference := first_difference(only)):
                found.append(difference)
                self._told.add(name)
        return found


def rule(name: str) -> str:
    """What a new process has of one that is told, and what to do about it."""
    if name.endswith(EXCHANGED):
        return (
            "a new process has what the script builds there: what the loop puts in its place it must put there in "
            "every step, by the step's number (docs/how-to/loops.md)"
        )
    if name.endswith(KEPT_BACK):
        return (
            "a new process has it as the script builds it, since something else in that module has changed as well: "
            "set it in every step, by the step's number (docs/how-to/loops.md)"
        )
    if name == HOOKS:
        return (
            "a new process has the hooks alone that the script hangs on in front of its loop: do so there, and have "
            "them go by the step's number (docs/how-to/loops.md)"
        )
    if name.startswith(_MODULES):
        own = "in the module's get_extra_state() (docs/how-to/loops.md)"
    elif name.startswith("scheduler"):
        return f"{_ANOTHERS}: step it by what all ranks share (all-reduce a metric first)"
    else:
        own = (
            "in `rank_state=`, if its state_dict() gives all that it goes by (of an average of a model with BatchNorm "
            "it may be the buffers alone: a replaced rank gets another one's)"
        )
    return f"{_ANOTHERS}: what each rank has of its own belongs {own}"


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
