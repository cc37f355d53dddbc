"""What the agent knows of saved states without a holder: what there is to go back to, and when there is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pure import checkpoint_rig
from resilient_train.launch.saves import CHECKPOINTS, Saves
from resilient_train.protocol.messages import Source


def saves(run_dir: Path) -> Saves:
    return Saves(run_dir, 2, 2, lambda *_, **__: None, lambda _: None, lambda _: None)


def chosen(run_dir: Path) -> Source | None:
    each = saves(run_dir)
    assert not each.choose()
    return each.source


def test_nothing_was_saved(tmp_path: Path) -> None:
    assert not saves(tmp_path).can_go_back()
    (tmp_path / CHECKPOINTS).mkdir()
    assert not saves(tmp_path).can_go_back(), "a folder is no state"
    (tmp_path / CHECKPOINTS / "step_4").mkdir()
    assert not saves(tmp_path).can_go_back(), "nor is half a checkpoint"
    assert saves(tmp_path).left() == ""
    assert chosen(tmp_path) is None


def test_the_newest_that_is_whole(tmp_path: Path) -> None:
    for step in (4, 8):
        checkpoint_rig.write(tmp_path / CHECKPOINTS, step)
    (tmp_path / CHECKPOINTS / "step_12").mkdir()
    assert saves(tmp_path).can_go_back()
    source = chosen(tmp_path)
    assert source is not None
    assert Path(source.path).name == "step_8"
    assert source.path in saves(tmp_path).left()


def test_storage_that_does_not_let_us_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CHECKPOINTS).write_text("in the way")
    blind = saves(tmp_path)
    assert blind.left() == ""
    assert blind.can_go_back(), "whoever tries hears why it is impossible"
    assert "can't be read" in blind.choose(), "all ranks must not begin anew beside what is there"
    assert blind.source is None
    monkeypatch.setattr(blind, "_held", lambda: Source("memory", 8))
    assert not blind.choose(), "what is in memory is as new"
    assert blind.source == Source("memory", 8)
