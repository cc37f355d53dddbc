"""Tensors out of a checkpoint into memory that is there already, whatever layout wrote it; digests on arrival."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from resilient_train._native import Copier
from resilient_train.errors import CheckpointError, ConfigError
from resilient_train.state.checkpoint.manifest import Manifest, TreeFile
from resilient_train.state.checkpoint.reading import Folder, parts
from resilient_train.state.checkpoint.segments import read_wanted, read_whole, segments_of
from resilient_train.state.checkpoint.target import BlockTarget
from resilient_train.state.checkpoint.verify import verify
from resilient_train.state.digest import tree_digest
from resilient_train.state.image import Header
from resilient_train.state.sharding import Piece

_COPY = re.compile(r"@\d+$")
_BUFFERS = "buffers."


class Checkpoint:
    """A checkpoint that is to be read. Made by ``read_checkpoint``; close it, or use it as a context manager."""

    def __init__(self, folder: Folder, manifest: Manifest, headers: tuple[Header, ...]) -> None:
        self._folder = folder
        self.manifest = manifest
        self._headers = headers
        self._parts = parts(manifest)
        self.tensors: Mapping[str, Piece] = {
            piece.name: Piece(piece.name, piece.dtype, piece.global_shape, piece.global_shape, (0,) * len(piece.shape))
            for header in headers
            for piece, _ in header.places
        }
        """All tensors, each as one whole piece."""

    @property
    def path(self) -> Path:
        return self._folder.path

    def tree(self, group: int = 0) -> TreeFile:
        """The state of a replica group without its tensors. Raises CheckpointError."""
        return self._folder.tree(self._parts.trees[group], self.manifest, group)

    def differing(self, groups: Sequence[int]) -> str:
        """The tensor that is not the same in these replica groups, so that none of them could go on from another's;
        empty if all are. Their trees are of one state. Buffers may be each rank's own: the first one's are taken.

        Each of them has saved its own of what is not divided among them, under a name with its number behind an ``@``;
        so it is with the copies of what is divided. Raises CheckpointError.
        """
        copies: dict[str, dict[str, None]] = {}
        for group in groups:
            for name in self.tree(group).names:
                if not name.startswith(_BUFFERS):
                    copies.setdefault(_COPY.sub("", name), {})[name] = None
        for names in copies.values():
            if len(names) > 1 and len({self._whole(name) for name in names}) > 1:
                return repr(next(iter(names)))
        return ""

    def _whole(self, name: str) -> bytes:
        piece = self.tensors[name]
        memory = bytearray(piece.size_bytes)
        self.load([BlockTarget(piece, memoryview(memory))], digests=False)
        return bytes(memory)

    def rank_state(self, rank: int) -> bytes | None:
        """What only this rank of the old world had; None if it was lost with the rank. Raises CheckpointError."""
        entry = self._parts.ranks.get(rank)
        return None if entry is None else self._folder.rank(entry, self.manifest, rank).own

    def load(self, targets: Sequence[BlockTarget], *, digests: bool = True) -> int:
        """Fills the targets; returns how many bytes were read from storage.

        ``digests``: each file that holds a part of a target is read whole, once, and its digest compared. Without
        (somebody has verified it already), only what is wanted is read. Raises ConfigError, before anything is written,
        for a target that the checkpoint does not hold; CheckpointError for a damaged file: the targets hold rubbish
        then.
        """
        wanted: dict[str, list[BlockTarget]] = {}
        for target in targets:
            self._check(target)
            wanted.setdefault(target.piece.name, []).append(target)
        total, copier = 0, Copier()
        for entry, header in zip(self._parts.shards, self._headers, strict=True):
            segments = list(segments_of(header, wanted))
            if not segments:
                continue
            with self._folder.opened(entry.name) as (fd, size):
                if size != entry.size_bytes:
                    raise CheckpointError(entry.name, f"has {size} bytes instead of {entry.size_bytes}")
                if not digests:
                    total += read_wanted(fd, segments, copier)
                    continue
                found = tree_digest([read_whole(fd, 0, size, segments, copier)])
                if found != entry.digest:
                    raise CheckpointError(entry.name, f"is damaged: its digest is {found}, not {entry.digest}")
                total += size
        return total

    def _check(self, target: BlockTarget) -> None:
        piece, held = target.piece, self.tensors.get(target.piece.name)
        if held is None:
            raise ConfigError(f"{self.path} holds no tensor {piece.name!r}")
        if (held.dtype, held.global_shape) != (piece.dtype, piece.global_shape):
            raise ConfigError(
                f"{self.path} holds {piece.name!r} as {held.dtype} {list(held.shape)}, here it is {piece.dtype} "
                f"{list(piece.global_shape)}"
            )
        assert target.memory.nbytes == piece.size_bytes

    def close(self) -> None:
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint after all checks but the tensors' digests. Raises CheckpointError."""
    report = verify(path, digests=False)
    report.raise_if_broken()
    assert report.manifest is not None
    return Checkpoint(Folder(path), report.manifest, report.headers)
