"""From memory to storage: the holder's work (``work.py``) that makes a checkpoint of all ranks' snapshots.

One call makes it all, so that neither a rank's nor the agent's death cuts a checkpoint whose snapshots are complete,
and what storage has refused leaves nothing behind.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from resilient_train.errors import ProtocolError, StorageError
from resilient_train.state.checkpoint.draft import Draft
from resilient_train.state.checkpoint.manifest import FileEntry
from resilient_train.state.checkpoint.retention import retain
from resilient_train.state.vault import trailer
from resilient_train.state.vault.work import Order, Part

WORK = "flush"
PLACE = f"{__name__}:flush"


class Flush(msgspec.Struct, frozen=True, array_like=True):
    """What checkpoint the snapshots are."""

    folder: str
    step: int
    commits: int
    replica_groups: tuple[tuple[int, ...], ...]
    libraries: dict[str, str]
    keep: int
    """Older checkpoints that stay."""


class Flushed(msgspec.Struct, frozen=True, array_like=True):
    """``path``: of the checkpoint. ``direct``: whether the page cache was left out."""

    path: str
    size_bytes: int
    direct: bool
    untidy: str
    """Why older ones could not be deleted; empty if they could."""


def flush(order: Order) -> bytes:
    """Writes the checkpoint. Raises StorageError, and takes away what there is of it, if storage fails;
    ProtocolError for snapshots that are not whole, or of another moment.
    """
    job = msgspec.msgpack.decode(order.argument, type=Flush)
    for snapshot, _ in order.parts:
        if snapshot.commits != job.commits:
            raise ProtocolError(f"rank {snapshot.rank}'s snapshot is from before update {snapshot.commits}, not "
                                f"{job.commits}")  # fmt: skip
    files: list[FileEntry] = []
    with Draft.begin(Path(job.folder), job.step) as draft:
        direct = [_add(draft, files, part, job) for part in order.parts]
        path = draft.commit(
            files,
            commits=job.commits,
            reason="save_every",
            replica_groups=job.replica_groups,
            shards=sum(map(len, job.replica_groups)),
            libraries=job.libraries,
        )
    untidy = ""
    try:
        retain(path.parent, job.keep, newest_step=job.step)
    except StorageError as error:  # the checkpoint itself is complete
        untidy = str(error)
    return msgspec.msgpack.encode(Flushed(str(path), sum(each.size_bytes for each in files), all(direct), untidy))


def _add(draft: Draft, files: list[FileEntry], part: Part, job: Flush) -> bool:
    snapshot = part.snapshot
    held = trailer.read(part.region, snapshot)
    groups = job.replica_groups
    world_size = sum(map(len, groups))
    written = draft.add_image(
        snapshot.rank, world_size, part.region, snapshot.image_bytes, snapshot.rank, held.chunk_digests()
    )
    files.append(written.entry)
    group = next(number for number, ranks in enumerate(groups) if snapshot.rank in ranks)
    if snapshot.rank == groups[group][0]:
        files.append(draft.add_tree(group, len(groups), held.tree, held.names, snapshot.rank))
    files.append(draft.add_rank(snapshot.rank, world_size, held.own))
    return written.direct
