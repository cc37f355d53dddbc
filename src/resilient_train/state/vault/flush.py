"""From memory to storage: the holder's work (``work.py``), one call for each rank's snapshot.

The first call begins the checkpoint's draft, the last one commits it. All run in one thread of the holder, so that
neither a rank's nor the agent's death cuts a checkpoint whose snapshots are complete.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from resilient_train.errors import StorageError
from resilient_train.state.checkpoint.draft import Draft
from resilient_train.state.checkpoint.manifest import FileEntry
from resilient_train.state.checkpoint.retention import retain
from resilient_train.state.vault import trailer
from resilient_train.state.vault.work import Order

WORK = "flush"
PLACE = f"{__name__}:flush"


class Flush(msgspec.Struct, frozen=True, array_like=True):
    """Which part of which checkpoint a snapshot is."""

    folder: str
    step: int
    commits: int
    replica_groups: tuple[tuple[int, ...], ...]
    libraries: dict[str, str]
    keep: int
    """Older checkpoints that stay."""


class Flushed(msgspec.Struct, frozen=True, array_like=True):
    """``path``: of the checkpoint, once it is complete."""

    path: str
    size_bytes: int
    direct: bool


_drafts: dict[tuple[str, int], tuple[Draft, list[FileEntry], set[int]]] = {}
"""The checkpoints under way in this process: files written so far, and the ranks whose they are."""


def flush(order: Order) -> bytes:
    """Writes one rank's files; raises StorageError, and takes the draft away, if storage fails."""
    job = msgspec.msgpack.decode(order.argument, type=Flush)
    key = job.folder, job.step
    rank = order.snapshot.rank
    if key not in _drafts:
        _drafts[key] = Draft.begin(Path(job.folder), job.step), [], set()
    draft, files, ranks = _drafts[key]
    try:
        direct = _add(draft, files, order, job)
        ranks.add(rank)
        path = ""
        if ranks == {each for group in job.replica_groups for each in group}:
            path = str(_commit(draft, files, job))
            del _drafts[key]
            retain(Path(job.folder), job.keep)
    except BaseException as error:
        _drafts.pop(key, None)
        draft.abandon()
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{draft.path}: rank {rank}'s part can't be written: {error}") from error
    return msgspec.msgpack.encode(Flushed(path, sum(each.size_bytes for each in files), direct))


def _add(draft: Draft, files: list[FileEntry], order: Order, job: Flush) -> bool:
    snapshot = order.snapshot
    held = trailer.read(order.region, snapshot)
    groups = job.replica_groups
    world_size = sum(map(len, groups))
    written = draft.add_image(
        snapshot.rank, world_size, order.region, snapshot.image_bytes, snapshot.rank, held.chunk_digests()
    )
    files.append(written.entry)
    group = next(number for number, ranks in enumerate(groups) if snapshot.rank in ranks)
    if snapshot.rank == groups[group][0]:
        files.append(draft.add_tree(group, len(groups), held.tree, held.names, snapshot.rank))
    files.append(draft.add_rank(snapshot.rank, world_size, held.own))
    return written.direct


def _commit(draft: Draft, files: list[FileEntry], job: Flush) -> Path:
    return draft.commit(
        files,
        commits=job.commits,
        reason="save_every",
        replica_groups=job.replica_groups,
        shards=sum(map(len, job.replica_groups)),
        libraries=job.libraries,
    )
