"""Corrupted checkpoints: each is refused with one error that names the file, and the next older one is taken.

A case is a number: it draws the layout, the kind of damage and its place, and is told on failure.
"""

import shutil
from pathlib import Path

import pytest

from pure.checkpoint_damage import DAMAGE, NEW, OLD, Case, bit_flip
from pure.checkpoint_forgery import FORGERIES, fifo, symbolic_link
from pure.checkpoint_rig import loaded, write
from resilient_train.errors import CheckpointError
from resilient_train.state.checkpoint.restore import read_checkpoint
from resilient_train.state.checkpoint.verify import newest_complete, verify

KINDS = [*DAMAGE, *FORGERIES]
CASES = [300, pytest.param(2500, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    made = {}
    for shards in (2, 3, 4):
        made[shards] = tmp_path_factory.mktemp("template")
        write(made[shards], OLD, shards=shards)
        write(made[shards], NEW, shards=shards)
        assert newest_complete(made[shards]).report.manifest.step == NEW, "undamaged, it is taken"
    return made


def check(seed: int, folder: Path, templates: dict[int, Path]) -> None:
    case = Case(folder, seed, templates)
    damage = KINDS[seed % len(KINDS)]
    told = f"case {seed}, {damage.__name__}"
    file = damage(case)
    found = newest_complete(folder)
    assert found.report is not None, told
    assert found.report.path == folder / f"step_{OLD}", told
    if not file:
        assert found.skipped == (), told
        return
    ((path, reason),) = found.skipped
    assert path == case.path, told
    report = verify(path)
    accused = {problem.file for problem in report.problems}
    if file == "shards":
        assert all(name == "." or name.startswith("shard-") for name in accused), (told, accused)
    else:
        assert file in accused, (told, accused, report.problems)
    assert 0 < len(reason) < 600, (told, reason)
    assert "\n" not in reason, told
    if damage in {bit_flip, symbolic_link, fifo}:
        assert accused == {file}, (told, report.problems)
    with pytest.raises(CheckpointError):
        read_whole(path)


def read_whole(path: Path) -> None:
    """What a resume does: the same damage must not slip through where bytes are read for use."""
    with read_checkpoint(path) as checkpoint:
        loaded(checkpoint, list(checkpoint.tensors.values()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", CASES)
def test_corrupted(templates: dict[int, Path], tmp_path: Path, cases: int) -> None:
    for seed in range(cases):
        folder = tmp_path / str(seed)
        try:
            check(seed, folder, templates)
        except BaseException as error:
            error.add_note(f"case {seed}, {KINDS[seed % len(KINDS)].__name__}")
            raise
        shutil.rmtree(folder)
