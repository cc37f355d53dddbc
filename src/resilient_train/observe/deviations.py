"""From the events of a run: which ranks came to other bits than they should. Who is here again and again has a device
that is to be looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from resilient_train.events import Event
from resilient_train.observe.fields import number_of, ranks_of


class Deviation(msgspec.Struct, frozen=True):
    """One rank, once."""

    rank: int
    what: Literal["computed", "held"]
    """Other bits from the same inputs; or other ones than most of its replicas, or than all held when they had trained
    that once more.
    """
    at: int | None
    """The step that was computed twice; the number of updates before which replicas were compared. None: not told."""
    device: str = ""
    """On which it was computed, or lay, and of which host. Empty: not told."""


def read_deviations(ordered: Iterable[Event]) -> tuple[Deviation, ...]:
    """In the order in which they were found. Where all ranks came to other bits, or nothing says which of some, or two
    replicas stand against each other, it is nobody's.
    """
    found: list[Deviation] = []
    world_size: int | None = None
    held_on: dict[int, str] = {}
    for event in ordered:
        if event.kind == "run_start":
            world_size = number_of(event, "world_size")
        elif event.kind == "deviates":
            ranks = ranks_of(event, "ranks")
            if len(ranks) != world_size and event.rank >= 0:
                step, devices = number_of(event, "step"), _devices(event)
                found += [Deviation(rank, "computed", step, devices.get(rank, "")) for rank in ranks]
        elif event.kind == "held_wrong":
            commits = number_of(event, "commits")
            found += [Deviation(rank, "held", commits, held_on.get(rank, "")) for rank in ranks_of(event, "ranks")]
        elif event.kind == "replicas_differ":
            commits, held_on = number_of(event, "commits"), _devices(event)
            found += [Deviation(rank, "held", commits, held_on.get(rank, "")) for rank in ranks_of(event, "alone")]
    return tuple(found)


def _devices(event: Event) -> dict[int, str]:
    told = event.detail.get("devices")
    rows = told.items() if isinstance(told, dict) else ()
    return {int(rank): device for rank, device in rows if rank.isdecimal() and isinstance(device, str)}


def last_agreement(runs: Iterable[Iterable[Event]]) -> tuple[int, int]:
    """The newest update before which all came to the same from each other's inputs, in all these runs, and the step
    that led to it; (-1, -1): there was none.
    """
    found = (-1, -1)
    for events in runs:
        for event in events:
            if event.kind == "verified" and event.detail.get("agreed") is True:
                commits, step = number_of(event, "commits"), number_of(event, "step")
                if commits is not None and step is not None:
                    found = (commits, step)
    return found


def count_deviations(runs: Iterable[Iterable[Event]]) -> Counter[tuple[int, str]]:
    """How often each rank has computed other bits on each device, in all these runs."""
    found = [each for events in runs for each in read_deviations(events)]
    return Counter((each.rank, each.device) for each in found if each.what == "computed")
