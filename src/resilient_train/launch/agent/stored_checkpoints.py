"""What lies on storage to go on from. Looked for in a process of its own: storage may be slow, or gone."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from resilient_train.errors import StorageError
from resilient_train.launch.agent.forked_work import aside
from resilient_train.protocol.messages import Source
from resilient_train.state.checkpoint.retention import set_aside, tidy
from resilient_train.state.checkpoint.verify import candidates, newest_complete


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """``source``: the newest checkpoint that is whole; None: there is none."""

    source: Source | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    """Newer ones, and why each won't do."""
    steps: tuple[int, ...] = ()
    """Of all that lie there by their names, whole or not."""
    untidy: str = ""
    """Why leftovers could not be taken away."""
    unreadable: str = ""
    """Why nobody can tell: there may be a checkpoint."""


async def find_stored(
    folder: Path,
    refused: Collection[Path] = (),
    *,
    bytes_too: bool,
    wrong_since: int | None = None,
    held: bool = False,
) -> Stored:
    """``bytes_too``: leftovers are taken away, and only a checkpoint whose bytes are right is whole. That takes as long
    as to read it. ``wrong_since``: those behind this step don't count, and are set aside for good if there is another
    one, or (``held``) memory has one.
    """
    if not is_there(folder):  # as a rule when a job begins: not worth a process
        return Stored()
    try:
        return msgspec.msgpack.decode(
            await aside(lambda: _look(folder, refused, bytes_too, wrong_since, held)), type=Stored
        )
    except OSError as error:
        return Stored(unreadable=str(error))


def is_there(folder: Path) -> bool:
    """Whether anything lies there, which may be worth a look."""
    return os.path.lexists(folder)


def _look(folder: Path, refused: Collection[Path], bytes_too: bool, wrong_since: int | None, held: bool) -> bytes:
    found = look(folder, refused, bytes_too=bytes_too, wrong_since=wrong_since)
    if wrong_since is not None and bytes_too and (held or found.source is not None):
        try:
            set_aside(folder, wrong_since)
        except StorageError as error:
            return msgspec.msgpack.encode(Stored(unreadable=str(error)))
    return msgspec.msgpack.encode(found)


async def set_wrong_aside(folder: Path, wrong_since: int, *, held: bool) -> str:
    """Sets the checkpoints from behind that step aside for good, on the same condition as ``find_stored``. Returns why
    they may still be there; empty if none is.
    """
    if not is_there(folder):
        return ""
    try:
        return (await aside(lambda: _set_wrong_aside(folder, wrong_since, held))).decode()
    except OSError as error:
        return str(error)


def _set_wrong_aside(folder: Path, wrong_since: int, held: bool) -> bytes:
    if not held and look(folder, bytes_too=False, wrong_since=wrong_since).source is None:
        return b"nothing else is saved"
    try:
        set_aside(folder, wrong_since)
    except StorageError as error:
        return str(error).encode()
    return b""


def look(folder: Path, refused: Collection[Path] = (), *, bytes_too: bool, wrong_since: int | None = None) -> Stored:
    """``find_stored``, here and now."""
    untidy = ""
    try:
        if bytes_too:
            tidy(folder)
    except StorageError as error:
        untidy = str(error)
    try:
        found = newest_complete(folder, digests=bytes_too, refused=refused, wrong_since=wrong_since)
    except OSError as error:
        return Stored(untidy=untidy, unreadable=str(error))
    source = None
    if found.report is not None and found.report.manifest is not None:
        source = Source("storage", found.report.manifest.commits, str(found.report.path))
    skipped = tuple((str(path), reason) for path, reason in found.skipped)
    steps = tuple(name.step for name, _ in candidates(folder) if not name.suffix)
    return Stored(source=source, skipped=skipped, steps=steps, untidy=untidy)
