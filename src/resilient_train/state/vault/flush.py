"""From memory to storage: the holder's work (``work.py``), one call for each rank's snapshot.

The first call begins the checkpoint's draft, the last one commits it. All run in one thread of the holder, so that
neither a rank's nor the agent's death cuts a checkpoint whose snapshots are complete.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from resilient_train.errors import StorageError
from resilient_train.state.checkpoint.draft import Draft
from resilient_train.state.checkpoint.manifest import FileEntry, Kind, rank_name
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
    savers: tuple[tuple[int, ...], ...]
    """By replica group, who has a part of its state. A shard's number is its rank, or the place in here at the end."""
    kind: Kind = "periodic"
    reason: str = "save_every"

    def writers(self) -> list[int]:
        """All savers, by group."""
        return [rank for group in self.savers for rank in group]

    def shard_of(self, rank: int) -> int:
        """The number of the rank's shard."""
        return rank if self.kind == "periodic" else self.writers().index(rank)


class Flushed(msgspec.Struct, frozen=True, array_like=True):
    """``path``: of the checkpoint, once it is complete."""

    path: str
    size_bytes: int
    direct: bool


_drafts: dict[tuple[str, Kind, int], tuple[Draft, list[FileEntry], set[int]]] = {}
"""The checkpoints under way in this process: files written so far, and the ranks whose they are."""


def flush(order: Order) -> bytes:
    """Writes one rank's files; raises StorageError, and takes the draft away, if storage fails."""
    job = msgspec.msgpack.decode(order.argument, type=Flush)
    key = job.folder, job.kind, job.step
    rank = order.snapshot.rank
    if key not in _drafts:
        _drafts[key] = Draft.begin(Path(job.folder), job.step, job.kind), [], set()
    draft, files, ranks = _drafts[key]
    try:
        direct = _add(draft, files, order, job)
        ranks.add(rank)
        path = ""
        if ranks == set(job.writers()):
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
    groups = job.savers
    world_size = sum(map(len, job.replica_groups))
    shard, shards = job.shard_of(snapshot.rank), len(job.writers())
    written = draft.add_image(shard, shards, order.region, snapshot.image_bytes, snapshot.rank, held.chunk_digests())
    files.append(written.entry)
    group = next(number for number, ranks in enumerate(groups) if snapshot.rank in ranks)
    if snapshot.rank == groups[group][0]:
        files.append(draft.add_tree(group, len(groups), held.tree, held.names, snapshot.rank))
    files += [draft.add_rank(rank, world_size, own) for rank, own in held.own.items()]
    return written.direct


def _commit(draft: Draft, files: list[FileEntry], job: Flush) -> Path:
    ranks = [rank for group in job.replica_groups for rank in group]
    names = {entry.name for entry in files}
    return draft.commit(
        files,
        commits=job.commits,
        reason=job.reason,
        replica_groups=job.replica_groups,
        shards=len(job.writers()),
        libraries=job.libraries,
        without_own_state=[rank for rank in ranks if rank_name(rank, len(ranks)) not in names],
        read_back=job.kind == "ttp",
    )
