"""Snapshots that nobody has come for, written to storage by their holder: what they are, they say themselves."""

from __future__ import annotations

import mmap
from pathlib import Path

import msgspec
import pytest

from pure.checkpoint_rig import holds, image, own, pieces, write
from resilient_train.errors import ProtocolError
from resilient_train.state.checkpoint.libraries import libraries_here
from resilient_train.state.checkpoint.manifest import Kind
from resilient_train.state.checkpoint.restore import read_checkpoint
from resilient_train.state.checkpoint.verify import verify
from resilient_train.state.digest import chunk_digests
from resilient_train.state.image import plan_image
from resilient_train.state.vault import trailer
from resilient_train.state.vault.flush import LEFT, Flush, Flushed, flush
from resilient_train.state.vault.holder_work import PinnedSnapshot, WorkOrder
from resilient_train.state.vault.record import Snapshot

STEP = 12


def part(rank: int, fingerprint: int) -> PinnedSnapshot:
    plan = plan_image(pieces(rank, 2), rank, 2)
    data = image(plan, STEP)[: plan.total_bytes]
    names = tuple(place.piece.name for place in plan.places)
    told = trailer.Trailer(
        1, STEP, STEP, b"\xc0", names, {rank: own(rank, STEP)}, b"".join(chunk_digests(data)), fingerprint
    )
    region = memoryview(mmap.mmap(-1, 1 << 20))
    region[: plan.total_bytes] = data
    trailer.write(region, plan.total_bytes, msgspec.msgpack.encode(told))
    snapshot = Snapshot(rank=rank, slot=0, sequence=1, commits=STEP, step=STEP, image_bytes=plan.total_bytes, world=2)
    return PinnedSnapshot(snapshot, region)


def written(
    folder: Path,
    *fingerprints: int,
    groups: tuple[tuple[int, ...], ...] = ((0,), (1,)),
    wrong_since: int | None = None,
) -> Flushed:
    job = Flush(str(folder), LEFT, LEFT, groups, libraries_here(), 1, savers=groups, wrong_since=wrong_since)
    parts = tuple(part(rank, fingerprint) for rank, fingerprint in enumerate(fingerprints))
    return msgspec.msgpack.decode(flush(WorkOrder(parts, msgspec.msgpack.encode(job))), type=Flushed)


def test_it_is_whole_and_older_ones_stay(tmp_path: Path) -> None:
    """Which of them must, the job alone knew."""
    folder = tmp_path / "checkpoints"
    for older in ("step_3", "step_7", "step_40_tmp", "wrong_step_40"):
        (folder / older).mkdir(parents=True)
    path = Path(written(folder, 5, 6).path)
    assert path == folder / f"step_{STEP}"
    assert verify(path).ok
    with read_checkpoint(path) as checkpoint:
        assert holds(checkpoint, STEP)
    assert sorted(each.name for each in folder.iterdir()) == [
        "step_12",
        "step_3",
        "step_40_tmp",
        "step_7",
        "wrong_step_40",
    ]


@pytest.mark.parametrize(("step", "kind"), [(12, "periodic"), (13, "periodic"), (12, "ttp")])
def test_one_as_new_on_storage_stays_as_it_is(tmp_path: Path, step: int, kind: Kind) -> None:
    there = write(tmp_path / "checkpoints", step, kind=kind)
    assert written(tmp_path / "checkpoints", 5, 6).path == ""
    assert [*(tmp_path / "checkpoints").iterdir()] == [there]


@pytest.mark.parametrize("step", [12, 13])
def test_one_that_is_damaged_or_wrong_is_not_in_the_way(tmp_path: Path, step: int) -> None:
    damaged = write(tmp_path / "damaged", step)
    (damaged / "manifest.json").unlink()
    assert verify(Path(written(tmp_path / "damaged", 5, 6).path)).ok
    write(tmp_path / "wrong", 13)
    assert verify(Path(written(tmp_path / "wrong", 5, 6, wrong_since=12).path)).ok


def test_a_run_directory_that_was_taken_away_is_not_made_again(tmp_path: Path) -> None:
    assert written(tmp_path / "gone" / "checkpoints", 5, 6).path == ""
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("fingerprints", "refused"), [((5, 5), False), ((5, 0), False), ((5, 6), True)])
def test_replicas_are_compared(tmp_path: Path, fingerprints: tuple[int, ...], refused: bool) -> None:
    """0: it was not made."""
    if not refused:
        assert written(tmp_path / "checkpoints", *fingerprints, groups=((0, 1),)).path
        return
    with pytest.raises(ProtocolError, match=r"ranks \[0, 1\] are to hold the same bits"):
        written(tmp_path / "checkpoints", *fingerprints, groups=((0, 1),))
    assert not [*tmp_path.iterdir()]
