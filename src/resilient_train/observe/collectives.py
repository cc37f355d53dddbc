"""A rank's newest collectives, as a file beside its Python stacks, and as one line for people.

torch's flight recorder keeps the last 2,000 collectives of a process; ``Groups.recorded`` gives them as JSON. The
file (JSON lines) has a heading, then torch's own entries, the newest first, as many as there is room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

ENTRIES_MAX = 256
FILE_BYTES_MAX = 256 << 10
_HEADING_BYTES_MAX = 4096
_TENSORS_TOLD = 2


class Heading(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file's first line. ``newest``: see ``told``; empty where nothing was recorded."""

    rank: int
    incarnation: int
    newest: str = ""
    left_out: int = 0
    """Older entries that the recorder had, and the file has not."""
    error: str = ""
    """Why there is nothing."""


def file_of(folder: Path, rank: int, incarnation: int) -> Path:
    """Where that process of the rank writes."""
    return folder / f"rank_{rank}.{incarnation}.collectives.jsonl"


def report_of(dump: bytes, rank: int, incarnation: int) -> bytes:
    """The file's content. Raises msgspec.DecodeError for a ``dump`` that is no recorder's."""
    entries = msgspec.json.decode(dump, type=_Dump).entries[::-1]
    lines: list[bytes] = []
    room = FILE_BYTES_MAX - _HEADING_BYTES_MAX
    for entry in entries[:ENTRIES_MAX]:
        line = msgspec.json.encode(entry)
        room -= len(line) + 1
        if room < 0:
            break
        lines.append(line)
    newest = told(entries[0])[: _HEADING_BYTES_MAX // 8] if entries else ""
    heading = Heading(rank, incarnation, newest, len(entries) - len(lines))
    return b"".join(line + b"\n" for line in (msgspec.json.encode(heading), *lines))


def failure_of(error: BaseException, rank: int, incarnation: int) -> bytes:
    """The file's content where the recorder could not be asked."""
    text = f"{type(error).__name__}: {error}"[: _HEADING_BYTES_MAX // 8]
    return msgspec.json.encode(Heading(rank, incarnation, error=text)) + b"\n"


def told(entry: Mapping[str, Any]) -> str:
    """``in all_reduce 41 of group 0 (generation 2), Float [3, 5]``. What an entry fails to say is left out."""
    verb = str(entry.get("profiling_name", "?")).rpartition(":")[2]
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", "?")
    name, description = (*map(str, entry.get("process_group") or ()), "", "")[:2]
    group = f"group {name or '?'}" + (f" ({description})" if description else "")
    given = list(zip(entry.get("input_dtypes") or (), entry.get("input_sizes") or (), strict=False))
    tensors = [f"{dtype} {sizes}" for dtype, sizes in given[:_TENSORS_TOLD]]
    if len(given) > _TENSORS_TOLD:
        tensors.append(f"{len(given) - _TENSORS_TOLD} more")
    place = "past" if entry.get("retired") or entry.get("state") == "completed" else "in"
    return ", ".join([f"{place} {verb} {number} of {group}", *tensors])


def heading_of(path: Path) -> Heading:
    """The heading of a file. Raises OSError, and msgspec.DecodeError for a file that is none."""
    with path.open("rb") as file:
        return msgspec.json.decode(file.readline(_HEADING_BYTES_MAX), type=Heading)


class _Dump(msgspec.Struct):
    """As torch writes it. Without entries where the recorder is switched off, or has seen nothing."""

    entries: list[dict[str, Any]] = []
