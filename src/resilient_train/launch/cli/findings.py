"""What ``resilient-train doctor`` says of a thing that it looked at."""

from __future__ import annotations

import enum

import msgspec


class Grade(enum.StrEnum):
    """``PROBLEM``: jobs will not be recovered, or not start. ``NOTE``: they will, less well than they could."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    grade: Grade
    what: str
    text: str
