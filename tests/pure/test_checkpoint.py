"""A checkpoint goes out and comes back; into another layout too; and what is around it stays as it is."""

import fcntl
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pure.checkpoint_rig import (
    CUT,
    NAMES,
    add_files,
    block,
    holds,
    image,
    loaded,
    names,
    pieces,
    rows,
    value,
    whole,
    write,
)
from resilient_train.errors import CheckpointError, ConfigError, StorageError
from resilient_train.state import digest
from resilient_train.state.checkpoint import segments
from resilient_train.state.checkpoint.draft import CheckpointDraft
from resilient_train.state.checkpoint.files import write_image
from resilient_train.state.checkpoint.manifest import folder_name, parse_name
from resilient_train.state.checkpoint.restore import Checkpoint, read_checkpoint
from resilient_train.state.checkpoint.target import BlockTarget
from resilient_train.state.checkpoint.verify import verify
from resilient_train.state.image import plan_image
from resilient_train.state.sharding import Piece


def commit(draft: CheckpointDraft, shards: int = 2, **changes) -> Path:
    fields = {"commits": draft.step, "reason": "", "replica_groups": [[r] for r in range(shards)], "shards": shards}
    return draft.commit(add_files(draft, draft.step, shards), libraries={}, **(fields | changes))


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_there_and_back(shards: int, tmp_path: Path) -> None:
    path = write(tmp_path, 120, shards=shards)
    assert path == tmp_path / "step_120"
    assert verify(path).problems == ()
    with read_checkpoint(path) as checkpoint:
        assert holds(checkpoint, 120)
        assert not holds(checkpoint, 121), "a check that cannot fail"
        assert checkpoint.manifest.commits == 120
        assert checkpoint.tree(shards - 1).tree == b"\xc0"
    assert names(tmp_path) == ["step_120"]


def test_manifest_is_for_people_too(tmp_path: Path) -> None:
    path = write(tmp_path, 5, kind="ttp")
    assert path.name == "ttp_saved_checkpoints-step_5"
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["version"], manifest["kind"], manifest["step"], manifest["world_size"]) == (1, "ttp", 5, 2)
    assert {entry["name"]: entry["size_bytes"] for entry in manifest["files"]} == {
        file.name: file.stat().st_size for file in path.iterdir() if file.name != "manifest.json"
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_any_block_from_any_layout(data: st.DataObject, checkpoints: dict[int, Path]) -> None:
    """Blocks at random, of tensors cut by rows into 1 to 4 files, several of one tensor at once."""
    path = checkpoints[data.draw(st.integers(1, 4))]
    wanted = []
    for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5)):
        with read_checkpoint(path) as checkpoint:
            tensor = checkpoint.tensors[name]
        low = tuple(data.draw(st.integers(0, extent)) for extent in tensor.shape)
        shape = tuple(data.draw(st.integers(0, n - at)) for at, n in zip(low, tensor.shape, strict=True))
        wanted.append(Piece(name, tensor.dtype, shape, tensor.shape, low))
    with read_checkpoint(path) as checkpoint:
        for digests in (True, False):
            for piece, array in zip(wanted, loaded(checkpoint, wanted, digests=digests), strict=True):
                assert np.array_equal(array, block(value(piece.name, 9), piece)), (piece, digests)


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, Path]:
    """Written in chunks, and read in batches of one, that are so small that tensors lie across their borders."""
    monkeypatch.setattr(digest, "CHUNK_BYTES", 40)
    monkeypatch.setattr(segments, "_BATCH_BYTES", 40)
    return {shards: write(tmp_path / str(shards), 9, shards=shards) for shards in range(1, 5)}


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 1, shards=4)
    with read_checkpoint(path) as checkpoint:
        first = pieces(0, 4)[0]
        target = [BlockTarget(first, memoryview(bytearray(first.size_bytes)))]
        assert checkpoint.load(target, digests=False) == first.size_bytes
        assert checkpoint.load(target) == (path / "shard-0-of-4.safetensors").stat().st_size


def test_damage_is_seen_on_arrival(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    with read_checkpoint(path) as checkpoint:
        file = path / "shard-1-of-2.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"shard-1-of-2\.safetensors is damaged"):
            loaded(checkpoint, list(checkpoint.tensors.values()))
        file.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match="instead of"):
            loaded(checkpoint, list(checkpoint.tensors.values()))
        file.unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            loaded(checkpoint, list(checkpoint.tensors.values()))


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (whole("x", "F32", (8, 6)), "holds no tensor 'x'"),
        (whole("model.0.weight", "F32", (6, 8)), r"as F32 \[8, 6\], here it is F32 \[6, 8\]"),
        (whole("model.0.weight", "F16", (8, 6)), "here it is F16"),
    ],
)
def test_another_model(piece: Piece, words: str, tmp_path: Path) -> None:
    with read_checkpoint(write(tmp_path, 1)) as checkpoint:
        with pytest.raises(ConfigError, match=words):
            checkpoint.load([BlockTarget(piece, memoryview(bytearray(piece.size_bytes)))])


def test_ranks_whose_own_state_is_lost(tmp_path: Path) -> None:
    with CheckpointDraft.begin(tmp_path, 3, "ttp") as draft:
        files = [entry for entry in add_files(draft, 3, 2) if not entry.name.startswith("rank-1")]
        (draft.path / "rank-1-of-2.msgpack").unlink()
        path = draft.commit(
            files, commits=3, reason="", replica_groups=[[0], [1]], shards=2, libraries={}, without_own_state=[1]
        )
    with read_checkpoint(path) as checkpoint:
        assert checkpoint.rank_state(0) is not None
        assert checkpoint.rank_state(1) is None


def test_a_newer_one_of_the_same_step_takes_its_place(tmp_path: Path) -> None:
    write(tmp_path, 4, shards=2)
    path = write(tmp_path, 4, shards=3)
    assert verify(path).manifest.shards == 3
    assert names(tmp_path) == ["step_4"]


def test_what_was_not_committed_goes(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(RuntimeError), CheckpointDraft.begin(tmp_path, 2) as draft:
        add_files(draft, 2, 2)
        raise RuntimeError
    assert names(tmp_path) == ["step_1"]


def test_a_dead_writers_draft_makes_room_a_living_ones_does_not(tmp_path: Path) -> None:
    first = CheckpointDraft.begin(tmp_path, 2)
    add_files(first, 2, 2)
    with pytest.raises(StorageError, match="is being written by another process"):
        CheckpointDraft.begin(tmp_path, 2)
    first.close()  # as the kernel does for the dead
    with CheckpointDraft.begin(tmp_path, 2) as draft:
        commit(draft)
    assert verify(tmp_path / "step_2").ok


def test_several_processes_write_one(tmp_path: Path) -> None:
    with CheckpointDraft.begin(tmp_path, 2) as draft:
        others = CheckpointDraft.join(draft.path)
        files = add_files(others, 2, 2)
        others.close()
        assert draft.path.exists(), "only who began it takes it away"
        path = draft.commit(files, commits=2, reason="", replica_groups=[[0], [1]], shards=2, libraries={})
    assert verify(path).ok


def test_a_draft_that_is_being_removed_is_not_joined(tmp_path: Path) -> None:
    draft = CheckpointDraft.begin(tmp_path, 2)
    draft.close()
    fd = os.open(draft.path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="is being removed"):
        CheckpointDraft.join(draft.path)
    os.close(fd)


def test_read_back_finds_what_storage_made_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, read_back=True)
    true_fsync = os.fsync

    def flips(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "shard-0-of-2.safetensors":
            os.pwrite(fd, b"?", os.fstat(fd).st_size - 1)
        true_fsync(fd)

    monkeypatch.setattr(os, "fsync", flips)
    monkeypatch.setattr("resilient_train.state.checkpoint.files.os.O_DIRECT", 0)  # one byte is no direct write
    with pytest.raises(CheckpointError, match=r"step_2_tmp/shard-0-of-2\.safetensors is damaged"):
        write(tmp_path, 2, read_back=True)
    assert names(tmp_path) == ["step_1"]


@pytest.mark.parametrize("kind", ["periodic", "ttp"])
def test_names(kind) -> None:
    assert parse_name(folder_name(kind, 12)) == (kind, 12, "")
    assert parse_name(folder_name(kind, 0) + "_tmp") == (kind, 0, "_tmp")
    assert parse_name(folder_name(kind, 0) + "_tmp_gone") == (kind, 0, "_gone")


@pytest.mark.parametrize(
    "name",
    ["", "step_", "step_01", "step_-1", "step_1x", "xstep_1", "step_1_", "step_" + "9" * 30, "step_\u0661", "step_1\n"],
)
def test_what_is_no_name(name: str) -> None:
    assert parse_name(name) is None


def test_an_image_by_direct_io(tmp_path: Path) -> None:
    """Where this file system takes it; the file ends where it must, and the slot's padding is not in it."""
    plan = plan_image(pieces(0, 2), 0, 2)
    memory = image(plan, 1)
    direct = write_image(tmp_path / "direct", memory, plan.total_bytes)
    assert not write_image(tmp_path / "cached", memory[: plan.total_bytes], plan.total_bytes)
    assert (tmp_path / "direct").read_bytes() == (tmp_path / "cached").read_bytes() == memory[: plan.total_bytes]
    fd = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        possible = bool(os.pwrite(fd, memory[:4096], 0))
    except OSError:
        possible = False
    os.close(fd)
    assert direct == possible


def test_memory_that_is_not_aligned_goes_through_the_page_cache(tmp_path: Path) -> None:
    plan = plan_image(pieces(0, 2), 0, 2)
    odd = memoryview(bytearray(plan.capacity_bytes + 1))[1:]
    odd[: plan.total_bytes] = image(plan, 1)[: plan.total_bytes]
    write_image(tmp_path / "file", odd, plan.total_bytes)
    assert (tmp_path / "file").read_bytes() == odd[: plan.total_bytes]
    assert rows(CUT["model.0.weight"][1][0], 2, 0) == slice(0, 4)


def test_buffers_may_be_each_ranks_own_where_a_model_is_divided_anew() -> None:
    """Nothing else that is not divided may, or one rank's would be taken for all."""
    held = {"buffers.0.1.mean@0": b"1", "buffers.0.1.mean@1": b"2", "extra.ema@0": b"3", "extra.ema@1": b"3"}
    tree = lambda group: SimpleNamespace(names=[name for name in held if name.endswith(f"@{group}")])
    checkpoint: Any = SimpleNamespace(tree=tree, _whole=held.__getitem__)
    assert Checkpoint.differing(checkpoint, [0, 1]) == ""
    held["extra.ema@1"] = b"4"
    assert Checkpoint.differing(checkpoint, [0, 1]) == "'extra.ema@0'"
