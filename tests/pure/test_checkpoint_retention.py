"""What goes and what stays."""

from pathlib import Path

import pytest

from pure.checkpoint_rig import names, write
from resilient_train.launch.agent.stored_checkpoints import look
from resilient_train.state.checkpoint.draft import CheckpointDraft
from resilient_train.state.checkpoint.manifest import REPLACED
from resilient_train.state.checkpoint.retention import retain, set_aside, tidy
from resilient_train.state.checkpoint.verify import newest_complete, verify
from resilient_train.state.nan import NanFound


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11, 100):
        write(tmp_path, step)
    assert [path.name for path in retain(tmp_path, 2)] == ["step_10", "step_9", "step_8"]
    assert names(tmp_path) == ["step_100", "step_11"]
    assert retain(tmp_path, 2) == []


def test_the_newest_without_nan_stays_too(tmp_path: Path) -> None:
    nan = NanFound(1, 6, "model.0.weight")
    for step in (1, 2, 3, 4):
        write(tmp_path, step, nan=nan if step > 2 else None)
    assert [path.name for path in retain(tmp_path, 1)] == ["step_3", "step_1"]
    assert retain(tmp_path, 1) == []
    write(tmp_path, 5, nan=nan)
    assert [path.name for path in retain(tmp_path, 2)] == []
    assert names(tmp_path) == ["step_2", "step_4", "step_5"]
    (tmp_path / "step_2" / "manifest.json").write_text("{}")
    write(tmp_path, 1)
    assert [path.name for path in retain(tmp_path, 1)] == ["step_4", "step_2"], "that one is not whole"
    write(tmp_path, 6)
    assert [path.name for path in retain(tmp_path, 1)] == ["step_5", "step_1"], "the newest one is without"


def test_the_newest_that_replicas_agreed_on_stays_too(tmp_path: Path) -> None:
    for step in (2, 3, 4, 5, 6):
        write(tmp_path, step)
    write(tmp_path, 3, nan=NanFound(1, 6, "model.0.weight"))
    assert [path.name for path in retain(tmp_path, 2, agreed_step=4)] == ["step_3", "step_2"]
    (tmp_path / "step_4" / "manifest.json").write_text("{}")
    write(tmp_path, 3)
    assert [path.name for path in retain(tmp_path, 1, agreed_step=4)] == ["step_5", "step_4"], "that one is not whole"
    assert retain(tmp_path, 1, agreed_step=3) == []
    assert [path.name for path in retain(tmp_path, 1, agreed_step=2)] == ["step_3"]
    assert retain(tmp_path, 1, agreed_step=6) == []


def test_those_that_the_job_went_back_behind_neither_count_nor_go(tmp_path: Path) -> None:
    for step in (2, 3, 4, 20, 30):
        write(tmp_path, step)
    assert [path.name for path in retain(tmp_path, 2, newest_step=4)] == ["step_2"]
    assert names(tmp_path) == ["step_20", "step_3", "step_30", "step_4"]


def test_what_is_set_aside_is_nobodys_source(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        write(tmp_path, step)
    write(tmp_path, 4, kind="ttp")
    moved = ["wrong_step_4", "wrong_ttp_saved_checkpoints-step_4"]
    for _ in range(2):
        assert sorted(path.name for path in set_aside(tmp_path, 3)) == moved
        assert names(tmp_path) == ["step_2", "step_3", *moved]
        report = newest_complete(tmp_path).report
        assert report is not None
        assert report.path == tmp_path / "step_3", "the one from before that step is right"
        assert [path.name for path in retain(tmp_path, 2)] == []
        assert tidy(tmp_path) == []
        write(tmp_path, 4)
        write(tmp_path, 4, kind="ttp")
    assert set_aside(tmp_path / "nothing", 3) == []


def test_a_wrong_one_that_comes_back_is_nobodys_source(tmp_path: Path) -> None:
    """It was moved aside for a newer one of its step, whose writer died."""
    for step in (3, 4):
        write(tmp_path, step)
    (tmp_path / "step_4").rename(tmp_path / f"step_4{REPLACED}")
    found = look(tmp_path, bytes_too=True, wrong_since=3)
    assert found.source is not None
    assert found.source.path == str(tmp_path / "step_3")
    assert names(tmp_path) == ["step_3", "step_4"]


def test_what_was_refused_is_not_offered_again(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    report = newest_complete(tmp_path, refused=[tmp_path / "step_2"]).report
    assert report is not None
    assert report.path == tmp_path / "step_1"
    assert newest_complete(tmp_path, refused=[tmp_path / "step_1", tmp_path / "step_2"]).report is None


def test_a_broken_one_does_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    (tmp_path / "step_4" / "manifest.json").unlink()
    (tmp_path / "step_2" / "shard-0-of-2.safetensors").unlink()
    assert [path.name for path in retain(tmp_path, 2)] == []
    write(tmp_path, 5)
    assert [path.name for path in retain(tmp_path, 2)] == ["step_2", "step_1"]
    assert names(tmp_path) == ["step_3", "step_4", "step_5"]


def test_the_end_of_life_is_never_deleted(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step, kind="ttp")
    for step in (3, 4):
        write(tmp_path, step)
    retain(tmp_path, 1)
    assert names(tmp_path) == ["step_4", "ttp_saved_checkpoints-step_1", "ttp_saved_checkpoints-step_2"]


def test_other_things_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    kept = write(tmp_path / "elsewhere", 1)
    (tmp_path / "step_1").symlink_to(kept)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_0_mine").mkdir()
    for step in (2, 3):
        write(tmp_path, step)
    retain(tmp_path, 1)
    tidy(tmp_path)
    assert verify(kept).ok, "a link is removed, not what it names"
    assert names(tmp_path) == ["elsewhere", "notes", "step_0_mine", "step_3"]


def test_leftovers_of_the_dead(tmp_path: Path) -> None:
    write(tmp_path, 1)
    CheckpointDraft.begin(tmp_path, 2).close()
    living = CheckpointDraft.begin(tmp_path, 3)
    write(tmp_path, 4).rename(tmp_path / "step_4_gone")
    write(tmp_path, 5).rename(tmp_path / "step_5_replaced")
    write(tmp_path, 6)
    write(tmp_path / "x", 6).rename(tmp_path / "step_6_replaced")
    (tmp_path / "x").rmdir()
    (tmp_path / "step_7_tmp").symlink_to("step_1")
    (tmp_path / "step_8_tmp_gone").mkdir()
    removed = {path.name for path in tidy(tmp_path)}
    assert removed == {"step_2_tmp", "step_4_gone", "step_6_replaced", "step_7_tmp", "step_8_tmp_gone"}
    assert names(tmp_path) == ["step_1", "step_3_tmp", "step_5", "step_6"]
    assert all(verify(tmp_path / name).ok for name in ("step_1", "step_5", "step_6"))
    living.abandon()
    assert tidy(tmp_path) == []


def test_moved_aside_and_nothing_in_its_place(tmp_path: Path) -> None:
    """Between two renames: it is found under its other name, before anybody has tidied up."""
    write(tmp_path, 1)
    write(tmp_path, 2).rename(tmp_path / "step_2_replaced")
    found = newest_complete(tmp_path)
    assert found.report.path.name == "step_2_replaced"
    assert found.skipped == ()


def test_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say whether the writer lives: its draft stays until its step is written again."""
    monkeypatch.setattr("resilient_train.state.checkpoint.files.fcntl.flock", _no_locks)
    CheckpointDraft.begin(tmp_path, 2).close()
    assert tidy(tmp_path) == []
    write(tmp_path, 3)
    assert names(tmp_path) == ["step_2_tmp", "step_3"]
    write(tmp_path, 2)
    assert names(tmp_path) == ["step_2", "step_3"]


def _no_locks(fd: int, operation: int) -> None:
    raise OSError(95, "Operation not supported")


def test_nothing_there(tmp_path: Path) -> None:
    assert tidy(tmp_path / "none") == []
    assert retain(tmp_path / "none", 3) == []
    assert newest_complete(tmp_path / "none") == (None, ())
