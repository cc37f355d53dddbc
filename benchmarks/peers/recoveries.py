"""What a fault did, read from the journals: who went on when, which steps were done twice or without the lost rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from peers.watch import Commit, Slot

PARTS = ("first_line", "imported", "entered", "ready")
"""The places that whoever begins anew passes, in this order."""


class Fault(NamedTuple):
    """A fault, and the last step that its victim is known to have committed."""

    slot: int
    time_ns: int
    step: int


class Reached(NamedTuple):
    """A step that enough ranks have committed, and when the last of them had."""

    step: int
    time_ns: int


def after_recovery(slot: Slot, fault: Fault) -> list[Commit]:
    """What this rank committed that the victim, as it was before the fault, can have had no part in.

    The victim may have given its gradients for one step more than it wrote down. Survivors apply that one without any
    recovery. Whoever goes back to a checkpoint shows it by a step that is not higher than the one before.
    """
    found: list[Commit] = []
    before = -1
    for commit in slot.commits:
        went_on = commit.step > fault.step + 1 or commit.step <= before
        if found or (commit.time_ns > fault.time_ns and went_on):
            found.append(commit)
        before = commit.step
    return found


def reached(commits: Iterable[Sequence[Commit]], count: int, least: int = 0) -> Reached | None:
    """The first moment at which ``count`` ranks had committed one and the same step, not below ``least``."""
    times: dict[int, list[int]] = {}
    for of_rank in commits:
        for step, time_ns in {each.step: each.time_ns for each in reversed(of_rank) if each.step >= least}.items():
            times.setdefault(step, []).append(time_ns)
    enough = [Reached(step, sorted(found)[count - 1]) for step, found in times.items() if len(found) >= count]
    return min(enough, key=lambda each: each.time_ns, default=None)


def all_back(slots: Sequence[Slot], ranks: int, fault: Fault, least: int = 0) -> Reached | None:
    """As many ranks as before are in step again; the one that takes the victim's place is a new process."""
    return reached(([c for c in slot.commits if c.time_ns > fault.time_ns] for slot in slots), ranks, least)


def survivors_on(slots: Sequence[Slot], ranks: int, fault: Fault) -> Reached | None:
    """All ranks but the victim have committed a step that it had no part in."""
    return reached((after_recovery(each, fault) for n, each in enumerate(slots) if n != fault.slot), ranks - 1)


def measured(slots: Sequence[Slot], ranks: int, fault: Fault) -> dict[str, Any]:
    """One fault in numbers; times in milliseconds from the signal, None for what has not come about."""
    others = [slot for index, slot in enumerate(slots) if index != fault.slot]
    after = [after_recovery(slot, fault) for slot in others]
    before = [
        {each.step for each in slot.commits[: len(slot.commits) - len(new)]}
        for slot, new in zip(others, after, strict=True)
    ]
    highest = max((step for steps in before for step in steps), default=fault.step)
    back = all_back(slots, ranks, fault)
    survivors = survivors_on(slots, ranks, fault)
    caught_up = all_back(slots, ranks, fault, highest + 1)

    def since(found: Reached | None) -> float | None:
        return (found.time_ns - fault.time_ns) / 1e6 if found else None

    def count(steps: set[int]) -> int:
        return len({step for step in steps if back is None or step < back.step})

    alone = [count({each.step for each in new} - old) for new, old in zip(after, before, strict=True)]
    went_on = [each for each in (since(survivors), since(back)) if each is not None]
    return {
        "slot": fault.slot,
        "step": fault.step,
        "all_ms": since(back),
        "survivors_ms": min(went_on, default=None),
        "caught_up_ms": since(caught_up),
        "redone": max(
            (len(old & {each.step for each in new}) for old, new in zip(before, after, strict=True)), default=0
        ),
        "without_it": max(alone, default=0),
        "parts_ms": _parts(slots, fault, back or survivors),
    }


def _parts(slots: Sequence[Slot], fault: Fault, end: Reached | None) -> dict[str, float]:
    """When the last of those who began anew came to each place, up to the end of the recovery."""
    if end is None:
        return {}
    times: dict[str, int] = {}
    for slot in slots:
        for mark in slot.marks:
            if fault.time_ns < mark.time_ns < end.time_ns:
                times[mark.name] = max(times.get(mark.name, 0), mark.time_ns)
    return {name: (times[name] - fault.time_ns) / 1e6 for name in PARTS if name in times}


def digests(slots: Sequence[Slot], after_ns: int) -> tuple[int, set[int]] | None:
    """The last step of which all that train still have a digest, with the digests: one, if they agree."""
    training = [slot for slot in slots if slot.commits and slot.commits[-1].time_ns > after_ns]
    if not training:
        return None
    common = set.intersection(*(set(slot.digests) for slot in training))
    latest = max(common, default=None)
    return None if latest is None else (latest, {slot.digests[latest] for slot in training})
