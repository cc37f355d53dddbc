"""Whether a checkpoint is whole, and which one to go on from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, TypeVar

from resilient_train.errors import CheckpointError
from resilient_train.state.checkpoint.manifest import GONE, MANIFEST, REPLACED, TMP, Manifest, Name, parse_name
from resilient_train.state.checkpoint.reading import ITSELF, Folder, Parts, parts
from resilient_train.state.image import Header
from resilient_train.state.sharding import Block, Piece, uncovered

_IMAGES = ".safetensors"
_T = TypeVar("_T")


class FileProblem(NamedTuple):
    """What is wrong, and with which file ("." for the directory itself)."""

    file: str
    reason: str


class Report(NamedTuple):
    """What ``verify`` found."""

    path: Path
    manifest: Manifest | None
    """None if it can't be believed."""
    headers: tuple[Header, ...]
    """Of the shards in their order; empty if one can't be believed."""
    problems: tuple[FileProblem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def without_nan(self) -> bool:
        return self.manifest is not None and not self.manifest.nan

    @property
    def size_bytes(self) -> int:
        """Of all files that the manifest lists."""
        return sum(entry.size_bytes for entry in self.manifest.files) if self.manifest else 0

    def raise_if_broken(self) -> None:
        """Raises CheckpointError for the first problem."""
        if self.problems:
            file, reason = self.problems[0]
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise CheckpointError(str(self.path if file == ITSELF else self.path / file), reason + more)


def verify(path: Path, *, digests: bool = True, uncommitted: bool = False) -> Report:
    """Checks everything that can be checked without the model; raises nothing whatever the directory holds.

    ``digests``: reads every byte; without, a flipped bit in a tensor is not found. ``uncommitted``: it is a draft yet.
    """
    problems: list[FileProblem] = []

    def attempt(check: Callable[..., _T], *arguments: object) -> _T | None:
        try:
            return check(*arguments)
        except CheckpointError as error:
            problems.append(FileProblem(error.file, error.reason))
            return None

    folder = attempt(Folder, path)
    if folder is None:
        return Report(path, None, (), tuple(problems))
    try:
        manifest = attempt(folder.manifest)
        if manifest is None:
            return Report(path, None, (), tuple(problems))
        attempt(_check_name, path, manifest, uncommitted)
        files = parts(manifest)
        attempt(_check_images, folder, files)
        found = [attempt(folder.header, entry, manifest, shard) for shard, entry in enumerate(files.shards)]
        headers = tuple(header for header in found if header is not None)
        if len(headers) == len(files.shards):
            attempt(_check_coverage, files, headers)
        else:
            headers = ()
        for rank, entry in files.ranks.items():
            attempt(folder.rank, entry, manifest, rank)
        names = {place.piece.name for header in headers for place in header.places}
        for group, entry in enumerate(files.trees):
            attempt(_check_tree, folder, manifest, group, entry.name, files, names if headers else None)
        if digests:
            broken = {problem.file for problem in problems}
            for entry in files.shards:
                if entry.name not in broken:
                    attempt(folder.check_digest, entry)
    finally:
        folder.close()
    return Report(path, manifest, headers, tuple(problems))


def _check_name(path: Path, manifest: Manifest, uncommitted: bool) -> None:
    name = parse_name(path.name)
    if name is None:
        return  # a copy under a name of the user's
    if name.suffix in {TMP, GONE} and not (uncommitted and name.suffix == TMP):
        raise CheckpointError(ITSELF, "was never committed" if name.suffix == TMP else "is being deleted")
    if (name.kind, name.step) != (manifest.kind, manifest.step):
        raise CheckpointError(
            MANIFEST, f"is of a {manifest.kind} checkpoint of step {manifest.step}, in a directory {path.name}"
        )


def _check_images(folder: Folder, files: Parts) -> None:
    """Torch's reader takes every image that lies there."""
    foreign = {name for name in folder.names() if name.endswith(_IMAGES)} - {entry.name for entry in files.shards}
    if foreign:
        raise CheckpointError(min(foreign), "is not listed in the manifest")


def _check_coverage(files: Parts, headers: tuple[Header, ...]) -> None:
    """All pieces of each tensor are there, once, and agree on what it is."""
    held: dict[str, list[Piece]] = {}
    for entry, header in zip(files.shards, headers, strict=True):
        for piece, _ in header.places:
            others = held.setdefault(piece.name, [])
            if others and (others[0].dtype, others[0].global_shape) != (piece.dtype, piece.global_shape):
                raise CheckpointError(
                    entry.name,
                    f"holds {piece.name!r} as {piece.dtype} {list(piece.global_shape)}, another shard as "
                    f"{others[0].dtype} {list(others[0].global_shape)}",
                )
            others.append(piece)
    for name, pieces in held.items():
        why = uncovered(pieces[0].global_shape, [Block(piece.offsets, piece.shape) for piece in pieces])
        if why:
            raise CheckpointError(ITSELF, f"does not hold tensor {name!r} whole: {why}")


def _check_tree(
    folder: Folder, manifest: Manifest, group: int, file: str, files: Parts, names: set[str] | None
) -> None:
    tree = folder.tree(files.trees[group], manifest, group)
    missing = [] if names is None else [name for name in tree.names if name not in names]
    if missing:
        raise CheckpointError(file, f"speaks of tensor {missing[0][:100]!r}, which no shard holds")


class Found(NamedTuple):
    """What there is to go on from."""

    report: Report | None
    """Of the newest complete checkpoint; None if there is none."""
    skipped: tuple[tuple[Path, str], ...]
    """Newer ones, and why each was refused."""


def candidates(folder: Path) -> list[tuple[Name, Path]]:
    """The checkpoints in a folder, whole or not, the newest first; of one step, that of the end of life first.

    Empty if there is no such folder. Raises OSError if it can't be read.
    """
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    named = [(name, path) for path in paths if (name := parse_name(path.name)) and name.suffix in {"", REPLACED}]
    named.sort(key=lambda each: (each[0].step, each[0].kind == "ttp", each[0].suffix == ""), reverse=True)
    return named


def newest_complete(
    folder: Path, *, digests: bool = True, refused: Collection[Path] = (), wrong_since: int | None = None
) -> Found:
    """The newest checkpoint that ``verify`` has nothing to say against, but none of ``refused``, and none from behind
    step ``wrong_since``.

    Raises OSError if the folder can't be read.
    """
    skipped: list[tuple[Path, str]] = []
    for name, path in candidates(folder):
        if path in refused or (wrong_since is not None and name.step > wrong_since):
            continue
        report = verify(path, digests=digests)
        if report.ok:
            return Found(report, tuple(skipped))
        skipped.append((path, f"{report.problems[0].file} {report.problems[0].reason}"))
    return Found(None, tuple(skipped))
