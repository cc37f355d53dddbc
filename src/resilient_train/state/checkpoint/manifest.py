"""What a checkpoint's directory is called and what must be in it; its manifest is written last and says the same."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec

from resilient_train.errors import CheckpointError
from resilient_train.state.digest import digest_of
from resilient_train.state.nan import NanFound

Kind = Literal["periodic", "ttp"]
"""``ttp``: an end-of-life checkpoint, written by survivors of a job that cannot go on."""

MANIFEST = "manifest.json"
FORMAT = "resilient_train.checkpoint"
VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20
"""Some 100,000 files."""

TMP, GONE, REPLACED = "_tmp", "_gone", "_replaced"
"""Suffixes: being written; being deleted; moved aside by a newer one of the same step, until that is in place."""
_PREFIXES: dict[Kind, str] = {"periodic": "step_", "ttp": "ttp_saved_checkpoints-step_"}
_NAME = re.compile(rf"(ttp_saved_checkpoints-)?step_(0|[1-9][0-9]{{0,17}})({TMP}|{REPLACED})?({GONE})?", re.ASCII)


class Name(NamedTuple):
    """A checkpoint directory's name, taken apart."""

    kind: Kind
    step: int
    suffix: str


def folder_name(kind: Kind, step: int) -> str:
    """``step_120``, or ``ttp_saved_checkpoints-step_120`` (MindIO's convention)."""
    return f"{_PREFIXES[kind]}{step}"


def parse_name(name: str) -> Name | None:
    """The inverse; None for a directory that is no checkpoint's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Name("ttp" if match[1] else "periodic", int(match[2]), match[4] or match[3] or "")


def shard_name(shard: int, shards: int) -> str:
    """A safetensors image."""
    return f"shard-{shard}-of-{shards}.safetensors"


def rank_name(rank: int, world_size: int) -> str:
    """What only this rank had: a ``RankFile`` in MessagePack."""
    return f"rank-{rank}-of-{world_size}.msgpack"


def tree_name(group: int, groups: int) -> str:
    """The state of a replica group without its tensors: a ``TreeFile`` in MessagePack."""
    return f"tree-{group}-of-{groups}.msgpack"


class RankFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's own state: random numbers, loader position, unsynchronised buffers."""

    step: int
    rank: int
    world_size: int
    own: bytes
    """As the framework packed it."""


class TreeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The replicated state of one group as ``state/tree.py`` flattens it; the tensors lie in the shards."""

    step: int
    group: int
    groups: int
    tree: bytes
    names: tuple[str, ...]
    """Of the tensors in the shards, by the numbers that stand for them in ``tree``."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file. ``digest`` is ``state/digest.py``'s; ``writer`` the rank for which, or by which, it was written."""

    name: str
    size_bytes: int
    digest: str
    writer: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole checkpoint. ``digest`` is that of the manifest itself with an empty one."""

    format: str = FORMAT
    version: int = VERSION
    kind: Kind
    step: int
    commits: int
    """Updates that the state has gone through."""
    reason: str
    time_ns: int
    """Wall clock, when the manifest was made."""
    world_size: int
    replica_groups: tuple[tuple[int, ...], ...]
    shards: int
    without_own_state: tuple[int, ...] = ()
    """Ranks whose own state was lost with them; only at the end of life."""
    nan: NanFound | msgspec.UnsetType = msgspec.UNSET
    """Left out where there is none."""
    libraries: dict[str, str]
    files: tuple[FileEntry, ...]
    digest: str = ""


class _Versioned(msgspec.Struct):
    format: str
    version: int


def encode(manifest: Manifest) -> bytes:
    """The file's content: JSON for people, with its own digest."""
    bare = msgspec.structs.replace(manifest, digest="")
    return _written(msgspec.structs.replace(bare, digest=digest_of(_written(bare))))


def _written(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode(content: bytes) -> Manifest:
    """The manifest of a file's content. Raises CheckpointError.

    It must be, byte for byte, what ``encode`` writes: so a changed bit is found wherever it is, and there is one way
    to read it.
    """
    if len(content) > MAX_MANIFEST_BYTES:
        raise CheckpointError(MANIFEST, f"has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        versioned = msgspec.json.decode(content, type=_Versioned)
        if versioned.format != FORMAT:
            raise CheckpointError(MANIFEST, f"is of the format {versioned.format[:50]!r}, not {FORMAT!r}")
        if versioned.version != VERSION:
            raise CheckpointError(MANIFEST, f"is of version {versioned.version}; this library reads version {VERSION}")
        manifest = msgspec.json.decode(content, type=Manifest)
        canonical = encode(manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(MANIFEST, f"is no manifest: {str(error)[:300]}") from None
    if canonical != content:
        raise CheckpointError(MANIFEST, "is damaged: it is not what its own digest says")
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Numbers that agree with one another, and exactly the files that follow from them."""
    world_size, groups = manifest.world_size, len(manifest.replica_groups)
    lost = set(manifest.without_own_state)
    expected = manifest.shards + world_size - len(lost) + groups
    if manifest.step < 0 or manifest.commits < 0 or manifest.shards < 1 or world_size < 1:
        raise CheckpointError(MANIFEST, "has a step, a world size or a number of shards below what is possible")
    if expected != len(manifest.files):  # also what bounds the sets below
        raise CheckpointError(
            MANIFEST,
            f"lists {len(manifest.files)} files; {manifest.shards} shards, {groups} replica groups and {world_size} "
            f"ranks need {expected}",
        )
    if sorted(rank for group in manifest.replica_groups for rank in group) != list(range(world_size)):
        raise CheckpointError(MANIFEST, f"has replica groups that are not the {world_size} ranks, each once")
    if not lost <= set(range(world_size)) or (lost and manifest.kind != "ttp"):
        raise CheckpointError(MANIFEST, "lacks the own state of ranks whose state it must have")
    if manifest.nan and not 1 <= manifest.nan.tensors <= manifest.nan.of:
        raise CheckpointError(MANIFEST, f"has {manifest.nan.tensors} tensors with NaN of {manifest.nan.of}")
    names = {shard_name(shard, manifest.shards) for shard in range(manifest.shards)}
    names |= {tree_name(group, groups) for group in range(groups)}
    names |= {rank_name(rank, world_size) for rank in range(world_size) if rank not in lost}
    listed = [entry.name for entry in manifest.files]
    for name in listed:
        if name not in names:
            raise CheckpointError(MANIFEST, f"lists {name[:100]!r}, which is not part of such a checkpoint, or twice")
        names.remove(name)
