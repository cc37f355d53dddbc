"""A checkpoint that is being written: a directory ``..._tmp`` that a rename makes a checkpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from resilient_train.errors import StorageError
from resilient_train.state.checkpoint.files import (
    lock,
    make_folder,
    remove,
    remove_leftover,
    storing,
    sync_folder,
    write_file,
    write_image,
)
from resilient_train.state.checkpoint.manifest import (
    MANIFEST,
    REPLACED,
    TMP,
    FileEntry,
    Kind,
    Manifest,
    RankFile,
    TreeFile,
    encode,
    folder_name,
    parse_name,
    rank_name,
    shard_name,
    tree_name,
)
from resilient_train.state.checkpoint.verify import verify
from resilient_train.state.digest import chunk_digests, digest_of, tree_digest
from resilient_train.state.nan import NanFound


class WrittenShard(NamedTuple):
    """A shard that is on storage."""

    entry: FileEntry
    direct: bool
    """Whether the page cache was left out."""


class CheckpointDraft:
    """Several processes may write files into one draft; the one that began it commits it, or takes it away.

    Every method raises StorageError where storage fails. The draft is gone then if this process began it; otherwise the
    file is, and the caller tells the process that did. As a context manager: what was not committed is taken away.
    """

    def __init__(self, path: Path, fd: int, *, owner: bool) -> None:
        """Use ``begin`` or ``join``."""
        self.path = path
        """The directory: ``FOLDER/step_<N>_tmp``."""
        name = parse_name(path.name)
        assert name is not None
        self.kind: Kind = name.kind
        self.step = name.step
        self.untidy = ""
        """After ``commit``: why the checkpoint that this one replaces could not be deleted."""
        self._fd = fd
        self._owner = owner

    @classmethod
    def begin(cls, folder: Path, step: int, kind: Kind = "periodic") -> CheckpointDraft:
        """A new draft for ``folder/step_<step>``; what a dead process left of the same is removed."""
        path = folder / (folder_name(kind, step) + TMP)
        with storing(path):
            make_folder(folder)
            if os.path.lexists(path) and not remove_leftover(path, assume_dead=True):
                raise StorageError(f"{path} is being written by another process")
            path.mkdir()
        try:
            return cls.join(path, owner=True)
        except StorageError:
            with contextlib.suppress(OSError):
                remove(path)
            raise

    @classmethod
    def join(cls, path: Path, *, owner: bool = False) -> CheckpointDraft:
        """Another process's draft, to add files to it."""
        with storing(path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            draft = cls(path, fd, owner=owner)
            # A shared lock is refused only while somebody who took the draft for a leftover removes it.
            if lock(fd, alone=False) is False:
                draft.close()
                raise StorageError(f"{path} is being removed by another process")
        return draft

    def add_image(
        self,
        shard: int,
        shards: int,
        image: memoryview,
        size_bytes: int,
        writer: int,
        chunks: Sequence[bytes] | None = None,
    ) -> WrittenShard:
        """Writes an image (``state/image.py``) of ``size_bytes``; directly if ``image`` is page-aligned and has room.

        ``chunks``: its ``chunk_digests``, where a copy has computed them already.
        """
        name = shard_name(shard, shards)
        with self._storing(name):
            direct = write_image(self.path / name, image, size_bytes)
        digests = chunk_digests(image[:size_bytes]) if chunks is None else chunks
        return WrittenShard(FileEntry(name, size_bytes, tree_digest(digests), writer), direct)

    def add_tree(self, group: int, groups: int, tree: bytes, names: Sequence[str], writer: int) -> FileEntry:
        """Writes a replica group's tree without tensors (``flatten``), and the names of its tensors by number."""
        content = TreeFile(self.step, group, groups, tree, tuple(names))
        return self._add(tree_name(group, groups), content, writer)

    def add_rank(self, rank: int, world_size: int, own: bytes) -> FileEntry:
        """Writes what only this rank has."""
        return self._add(rank_name(rank, world_size), RankFile(self.step, rank, world_size, own), rank)

    def _add(self, name: str, content: RankFile | TreeFile, writer: int) -> FileEntry:
        data = msgspec.msgpack.encode(content)
        with self._storing(name):
            write_file(self.path / name, data)
        return FileEntry(name, len(data), digest_of(data), writer)

    def commit(
        self,
        files: Sequence[FileEntry],
        *,
        commits: int,
        reason: str,
        replica_groups: Sequence[Sequence[int]],
        shards: int,
        libraries: Mapping[str, str],
        without_own_state: Sequence[int] = (),
        nan: NanFound | None = None,
        read_back: bool = False,
    ) -> Path:
        """Writes the manifest and makes the draft a checkpoint; returns its directory.

        ``files``: all entries, those of other processes too. ``read_back``: everything is read and compared first;
        raises CheckpointError, and takes the draft away, if it is not what was written. A checkpoint of the same kind
        and step that is there already makes room once this one is in place; if it can't be deleted, ``untidy`` says
        why, and ``tidy`` tries again.
        """
        assert self._owner
        manifest = Manifest(
            kind=self.kind,
            step=self.step,
            commits=commits,
            reason=reason,
            time_ns=time.time_ns(),
            world_size=sum(map(len, replica_groups)),
            replica_groups=tuple(map(tuple, replica_groups)),
            shards=shards,
            without_own_state=tuple(sorted(without_own_state)),
            nan=nan or msgspec.UNSET,
            libraries={name: f"{version}" for name, version in libraries.items()},  # torch's is no plain str
            files=tuple(sorted(files, key=lambda entry: entry.name)),
        )
        with self._storing(MANIFEST):
            write_file(self.path / MANIFEST, encode(manifest))
            sync_folder(self.path)
        if read_back:
            report = verify(self.path, uncommitted=True)
            if report.problems:
                self.abandon()
                report.raise_if_broken()
        with self._storing(""):
            final, replaced = self._rename()
        if os.path.lexists(replaced):
            try:
                with storing(replaced):
                    remove(replaced)
            except StorageError as error:  # this checkpoint is complete
                self.untidy = str(error)
        self.close()
        return final

    def _rename(self) -> tuple[Path, Path]:
        """Returns where the checkpoint is now, and where the one that it replaces would be."""
        folder = self.path.parent
        final = folder / self.path.name.removesuffix(TMP)
        replaced = folder / (final.name + REPLACED)
        if os.path.lexists(final):
            # The old one keeps its bytes, and readers find it under this name, until the new one is in place.
            if os.path.lexists(replaced):
                remove(replaced)
            final.rename(replaced)
        try:
            self.path.rename(final)
            sync_folder(folder)
        except OSError:
            with contextlib.suppress(OSError):
                if os.path.lexists(final):  # whole, but it might not survive a power cut
                    final.rename(self.path)
            with contextlib.suppress(OSError):  # it is found, and tidied up, under the other name too
                replaced.rename(final)
            raise
        return final, replaced

    def abandon(self) -> None:
        """Takes the draft away. Raises nothing, for it follows a failure that is told; ``tidy`` finds what is left."""
        if self._owner and os.path.lexists(self.path):
            with contextlib.suppress(OSError):
                remove(self.path)
        self.close()

    def close(self) -> None:
        """Gives the lock back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # of a directory that was only read
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            self.abandon()

    @contextlib.contextmanager
    def _storing(self, name: str) -> Iterator[None]:
        try:
            with storing(self.path / name):
                yield
        except StorageError:
            self.abandon()
            raise
