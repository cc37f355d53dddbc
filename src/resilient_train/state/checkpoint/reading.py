"""Reads a checkpoint's files as if an enemy had made them: no link is followed, nothing blocks, nothing is believed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from resilient_train.errors import CheckpointError
from resilient_train.state.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    RankFile,
    TreeFile,
    decode,
    rank_name,
    shard_name,
    tree_name,
)
from resilient_train.state.digest import digest_of, file_digest
from resilient_train.state.image import LENGTH, Header, header_length, parse_header

_MAX_REST_BYTES = 1 << 30
"""Of a file that is read into memory as a whole."""
_Rest = TypeVar("_Rest", RankFile, TreeFile)

ITSELF = "."
"""The ``file`` of a CheckpointError about the directory."""


class Folder:
    """An open checkpoint directory. Every method raises CheckpointError naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _reading(ITSELF):
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def close(self) -> None:
        os.close(self._fd)

    def names(self) -> list[str]:
        """What lies in it."""
        with _reading(ITSELF):
            return os.listdir(self._fd)  # noqa: PTH208 - of a descriptor: the directory that was opened, not its name

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, int]]:
        """(descriptor, size in bytes) of a regular file."""
        with _reading(name):
            # Without O_NONBLOCK the open of a FIFO waits for a writer.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=self._fd)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise CheckpointError(name, "is no regular file")
                yield fd, found.st_size
            finally:
                os.close(fd)

    def manifest(self) -> Manifest:
        """The manifest, itself verified."""
        with self.opened(MANIFEST) as (fd, size):
            if size > MAX_MANIFEST_BYTES:
                raise CheckpointError(MANIFEST, f"has {size} bytes, more than {MAX_MANIFEST_BYTES}")
            content = _pread(fd, MAX_MANIFEST_BYTES + 1, 0)
        return decode(content)

    def header(self, entry: FileEntry, manifest: Manifest, shard: int) -> Header:
        """What the file of shard ``shard`` says of itself; it must agree with the manifest."""
        with self.opened(entry.name) as (fd, size):
            _same_size(entry, size)
            length = header_length(entry.name, _pread(fd, LENGTH.size, 0), size)
            header = parse_header(entry.name, _pread(fd, length, LENGTH.size), size)
        if header.step != manifest.step:
            raise CheckpointError(entry.name, f"is of step {header.step}; the manifest is of step {manifest.step}")
        if (header.shard, header.shards) != (shard, manifest.shards):
            raise CheckpointError(
                entry.name, f"holds shard {header.shard} of {header.shards}, not {shard} of {manifest.shards}"
            )
        return header

    def check_digest(self, entry: FileEntry) -> None:
        """Reads the whole file, and compares."""
        with self.opened(entry.name) as (fd, size):
            _same_size(entry, size)
            found = file_digest(fd, size)
        if found != entry.digest:
            raise CheckpointError(entry.name, f"is damaged: its digest is {found}, not {entry.digest}")

    def rank(self, entry: FileEntry, manifest: Manifest, rank: int) -> RankFile:
        """A rank's own state, verified."""
        content = self._rest(entry, RankFile)
        if (content.step, content.rank, content.world_size) != (manifest.step, rank, manifest.world_size):
            raise CheckpointError(
                entry.name,
                f"is of rank {content.rank} of {content.world_size} at step {content.step}, not of rank {rank} of "
                f"{manifest.world_size} at step {manifest.step}",
            )
        return content

    def tree(self, entry: FileEntry, manifest: Manifest, group: int) -> TreeFile:
        """A replica group's tree, verified."""
        content = self._rest(entry, TreeFile)
        groups = len(manifest.replica_groups)
        if (content.step, content.group, content.groups) != (manifest.step, group, groups):
            raise CheckpointError(
                entry.name,
                f"is of group {content.group} of {content.groups} at step {content.step}, not of group {group} of "
                f"{groups} at step {manifest.step}",
            )
        return content

    def _rest(self, entry: FileEntry, kind: type[_Rest]) -> _Rest:
        with self.opened(entry.name) as (fd, size):
            _same_size(entry, size)
            if size > _MAX_REST_BYTES:
                raise CheckpointError(entry.name, f"has {size} bytes, more than {_MAX_REST_BYTES}")
            content = _pread(fd, size, 0)
        found = digest_of(content)
        if found != entry.digest:
            raise CheckpointError(entry.name, f"is damaged: its digest is {found}, not {entry.digest}")
        try:
            return msgspec.msgpack.decode(content, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointError(entry.name, f"is no {kind.__name__}: {str(error)[:300]}") from None


class Parts(NamedTuple):
    """The entries of a manifest by what they are."""

    shards: tuple[FileEntry, ...]
    trees: tuple[FileEntry, ...]
    ranks: dict[int, FileEntry]


def parts(manifest: Manifest) -> Parts:
    """A decoded manifest lists each of these exactly once."""
    entries = {entry.name: entry for entry in manifest.files}
    groups, world_size = len(manifest.replica_groups), manifest.world_size
    return Parts(
        tuple(entries[shard_name(shard, manifest.shards)] for shard in range(manifest.shards)),
        tuple(entries[tree_name(group, groups)] for group in range(groups)),
        {
            rank: entries[rank_name(rank, world_size)]
            for rank in range(world_size)
            if rank not in manifest.without_own_state
        },
    )


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(name, "is missing") from None
    except OSError as error:  # ELOOP: a symbolic link; ENXIO: a socket
        raise CheckpointError(name, f"can't be read: {error.strerror or error}") from None


def _same_size(entry: FileEntry, size: int) -> None:
    if size != entry.size_bytes:
        raise CheckpointError(entry.name, f"has {size} bytes instead of {entry.size_bytes}")


def _pread(fd: int, count: int, offset: int) -> bytes:
    """Up to ``count`` bytes, fewer only at the end of the file."""
    pieces = []
    while count:
        piece = os.pread(fd, count, offset)
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
        offset += len(piece)
    return b"".join(pieces)
