"""From the events of a run: which ranks became slower than they were, and which have always computed for longer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from resilient_train.events import Event
from resilient_train.observe.fields import amount_of, number_of
from resilient_train.protocol.stragglers import Pace


class Straggler(msgspec.Struct, frozen=True):
    """A rank that was slower than before; None where the event does not tell."""

    rank: int
    since: int | None
    """The step."""
    ratio: float | None
    """How many times as long it computed as before."""
    until: int | None = None
    """From this step on it was as before; None: it stayed slower, as far as is known."""


def read_stragglers(ordered: Iterable[Event]) -> tuple[Straggler, ...]:
    """In the order in which they were named."""
    found: list[Straggler] = []
    for event in ordered:
        if event.kind == "straggler":
            found.append(Straggler(event.rank, number_of(event, "since"), amount_of(event, "ratio")))
        elif event.kind == "straggler_over":
            until = number_of(event, "since")
            open_ones = (each.rank == event.rank and each.until is None for each in found)
            found = [
                msgspec.structs.replace(each, until=until) if still else each
                for each, still in zip(found, open_ones, strict=True)
            ]
    return tuple(found)


def read_paces(ordered: Iterable[Event]) -> dict[int, Pace]:
    """By rank, as last told; empty where nothing was."""
    told: object = {}
    for event in ordered:
        if event.kind == "compute":
            told = event.detail.get("ranks")
    try:
        return msgspec.convert(told, dict[int, Pace], strict=False)
    except msgspec.ValidationError:
        return {}
