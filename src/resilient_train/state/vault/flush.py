"""From memory to storage: the holder's work (``holder_work.py``) that makes a checkpoint of all ranks' snapshots.

One call makes it all, so that neither a rank's nor the agent's death cuts a checkpoint whose snapshots are complete,
and what storage has refused leaves nothing behind.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from resilient_train.errors import ProtocolError, StorageError
from resilient_train.protocol.replicas import disagreeing
from resilient_train.state.checkpoint.draft import CheckpointDraft
from resilient_train.state.checkpoint.files import storing
from resilient_train.state.checkpoint.manifest import FileEntry, Kind, rank_name
from resilient_train.state.checkpoint.retention import retain
from resilient_train.state.checkpoint.verify import newest_complete
from resilient_train.state.nan import NanFound, tensors_with_nan
from resilient_train.state.vault import trailer
from resilient_train.state.vault.holder_work import PinnedSnapshot, WorkOrder

WORK = "flush"
PLACE = f"{__name__}:flush"
LEFT = -1
"""The update of a Flush of whatever is there."""


class Flush(msgspec.Struct, frozen=True, array_like=True):
    """What checkpoint the snapshots are. Where ``commits`` is LEFT (see ``frames.LastWork``), and ``step``, they say so
    themselves.
    """

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
    agreed_step: int = -1
    """The newest checkpoint that is not of a later step stays too; -1: none has to."""
    wrong_since: int | None = None
    """Of whatever is there: what storage has from behind this step is wrong."""

    def writers(self) -> list[int]:
        """All savers, by group."""
        return [rank for group in self.savers for rank in group]

    def shard_of(self, rank: int) -> int:
        """The number of the rank's shard."""
        return rank if self.kind == "periodic" else self.writers().index(rank)


class Flushed(msgspec.Struct, frozen=True, array_like=True):
    """``path``: of the checkpoint. ``direct``: whether the page cache was left out."""

    path: str
    size_bytes: int
    direct: bool
    untidy: str
    """Why older ones could not be deleted; empty if they could."""
    nan: NanFound | None = None
    """What of the state is NaN."""


def flush(order: WorkOrder) -> bytes:
    """Writes the checkpoint. Raises StorageError, and takes away what there is of it, if storage fails;
    ProtocolError for snapshots that are not whole, or of another moment.
    """
    job = msgspec.msgpack.decode(order.argument, type=Flush)
    is_left = job.commits == LEFT
    if is_left:
        newest = order.parts[0].snapshot
        if not _is_wanted(Path(job.folder), newest.step, job.wrong_since):
            return msgspec.msgpack.encode(Flushed("", 0, False, ""))
        job = msgspec.structs.replace(job, step=newest.step, commits=newest.commits)
    for snapshot, _ in order.parts:
        if snapshot.commits != job.commits:
            raise ProtocolError(f"rank {snapshot.rank}'s snapshot is from before update {snapshot.commits}, not "
                                f"{job.commits}")  # fmt: skip
    if is_left:
        _compare(order, job)
    files: list[FileEntry] = []
    with CheckpointDraft.begin(Path(job.folder), job.step, job.kind) as draft:
        direct = [_add(draft, files, part, job) for part in order.parts]
        nan = _nan(order)
        path = _commit(draft, files, job, nan)
    untidy = draft.untidy
    try:
        if not is_left:  # which of them must stay may not be known any more
            retain(path.parent, job.keep, newest_step=job.step, agreed_step=job.agreed_step)
    except StorageError as error:  # the checkpoint itself is complete
        untidy = str(error)
    size_bytes = sum(each.size_bytes for each in files)
    return msgspec.msgpack.encode(Flushed(str(path), size_bytes, all(direct), untidy, nan))


def _is_wanted(folder: Path, step: int, wrong_since: int | None) -> bool:
    """Not where storage has it, or a newer one that looks whole; nor where the run directory has been taken away."""
    with storing(folder):
        stored = newest_complete(folder, digests=False, wrong_since=wrong_since).report
    newest = stored.manifest.step if stored is not None and stored.manifest is not None else -1
    return folder.parent.is_dir() and newest < step


def _compare(order: WorkOrder, job: Flush) -> None:
    """Nobody has: a checkpoint is made of shares of all replicas. Raises ProtocolError."""
    told = {each.snapshot.rank: trailer.read(each.region, each.snapshot).fingerprint for each in order.parts}
    if differing := disagreeing(job.replica_groups, told):
        raise ProtocolError(f"ranks {differing} are to hold the same bits, and don't")


def _add(draft: CheckpointDraft, files: list[FileEntry], part: PinnedSnapshot, job: Flush) -> bool:
    snapshot = part.snapshot
    held = trailer.read(part.region, snapshot)
    groups = job.savers
    world_size = sum(map(len, job.replica_groups))
    shard, shards = job.shard_of(snapshot.rank), len(job.writers())
    written = draft.add_image(shard, shards, part.region, snapshot.image_bytes, snapshot.rank, held.chunk_digests())
    files.append(written.entry)
    group = next(number for number, ranks in enumerate(groups) if snapshot.rank in ranks)
    if snapshot.rank == groups[group][0]:
        files.append(draft.add_tree(group, len(groups), held.tree, held.names, snapshot.rank))
    files += [draft.add_rank(rank, world_size, own) for rank, own in held.own.items()]
    return written.direct


def _nan(order: WorkOrder) -> NanFound | None:
    """Beside the training, and of what is written: so it costs the ranks nothing, and is true of the checkpoint."""
    names, spoilt = set[str](), set[str]()
    for part in order.parts:
        held, found = tensors_with_nan(part.region, part.snapshot.image_bytes)
        names |= held
        spoilt |= found
    return NanFound(len(spoilt), len(names), min(spoilt)) if spoilt else None


def _commit(draft: CheckpointDraft, files: list[FileEntry], job: Flush, nan: NanFound | None) -> Path:
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
        nan=nan,
        read_back=job.kind == "ttp",
    )
