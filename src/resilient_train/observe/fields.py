"""Typed reads of an event's ``detail``: what is missing, or of another type than ours, is unknown."""

from __future__ import annotations

from resilient_train.events import Event


def number_of(event: Event, key: str) -> int | None:
    """The whole number under ``key``; None if there is none."""
    value = event.detail.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def seconds_of(event: Event, key: str) -> float | None:
    """The time under ``key``; None if there is none, or none that can be."""
    return amount_of(event, key)


def amount_of(event: Event, key: str) -> float | None:
    """The number from 0 under ``key``, whole or not; None if there is none."""
    value = event.detail.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < float("inf") else None


def text_of(event: Event, key: str) -> str | None:
    """The text under ``key``; None if there is none."""
    value = event.detail.get(key)
    return value if isinstance(value, str) else None


def ranks_of(event: Event, key: str) -> tuple[int, ...]:
    """The ranks under ``key``; () if there are none."""
    value = event.detail.get(key)
    return tuple(rank for rank in value if isinstance(rank, int)) if isinstance(value, list) else ()


def groups_of(event: Event, key: str) -> tuple[tuple[int, ...], ...]:
    """The lists of ranks under ``key``; () if there are none."""
    value = event.detail.get(key)
    groups = value if isinstance(value, list) else []
    return tuple(tuple(rank for rank in group if isinstance(rank, int)) for group in groups if isinstance(group, list))
