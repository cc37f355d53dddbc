"""How much memory may still be taken: the limits of all control groups above us, and the machine's own.

Asked before a page is touched: beyond a limit the kernel does not refuse a page, it kills a process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MARGIN_BYTES = 64 << 20
"""Left over for what the processes themselves need meanwhile."""
_RECLAIMABLE = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")
"""Page cache counts against the limit, and is given up for other pages. In version 1 the totals hold the children,
too.
"""


class Room(NamedTuple):
    """What ``source`` leaves free of its limit."""

    source: str
    free_bytes: int
    limit_bytes: int


def tightest(root: Path = Path("/")) -> Room:
    """The limit that is reached first. ``root`` is where ``proc`` and ``sys`` are."""
    rooms = [_machine(root), *_groups(root)]
    return min(rooms, key=lambda room: room.free_bytes)


def refusal(rank: int, needed_bytes: int, promised_bytes: int, room: Room) -> str:
    """Why ``needed_bytes`` more are too many; empty if they are not. ``promised``: given away, but not touched yet."""
    missing = needed_bytes + promised_bytes + MARGIN_BYTES - room.free_bytes
    if missing <= 0:
        return ""
    promised = f", of which {_size(promised_bytes)} are promised to other ranks already" if promised_bytes else ""
    return (
        f"rank {rank}: its two memory snapshots need {_size(needed_bytes)} (and {_size(MARGIN_BYTES)} to spare), but "
        f"{room.source} of {_size(room.limit_bytes)} leaves {_size(max(0, room.free_bytes))}{promised}. Nothing was "
        f"allocated. Raise the limit by {_size(missing)}, or train without memory checkpoints"
    )


def _machine(root: Path) -> Room:
    kib = dict(_words(root / "proc/meminfo"))
    return Room("the memory of this machine", kib["MemAvailable"] << 10, kib["MemTotal"] << 10)


def _groups(root: Path) -> Iterator[Room]:
    member = root / "proc/self/cgroup"
    for line in member.read_text().splitlines() if member.exists() else ():  # a kernel may be built without groups
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(root, root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            yield from _limits(root, base, path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _limits(root: Path, base: Path, path: str, limit_name: str, used_name: str) -> Iterator[Room]:
    group = base / path.lstrip("/")
    # In a container the path may be one of the host, which is not to be seen: then the container's own is at the base.
    chain = [folder for folder in (group, *group.parents) if folder == base or base in folder.parents]
    for folder in chain:
        with contextlib.suppress(FileNotFoundError):
            limit = (folder / limit_name).read_text().strip()
            if limit == "max":
                continue
            cached = sum(value for name, value in _words(folder / "memory.stat") if name in _RECLAIMABLE)
            used = int((folder / used_name).read_text())
            shown = f"/{(folder / limit_name).relative_to(root)}"
            yield Room(f"the memory limit {shown}", int(limit) - max(0, used - cached), int(limit))


def _words(path: Path) -> Iterator[tuple[str, int]]:
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdigit():
            yield words[0].rstrip(":"), int(words[1])


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
