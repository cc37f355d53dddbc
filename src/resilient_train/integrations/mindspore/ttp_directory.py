"""Directories of end-of-life checkpoints, named as MindSpore's ``TrainFaultTolerance`` names them.

    FOLDER/ttp_saved_checkpoints-step_7/rank_0/ttp_rank_0-2_1.ckpt      step 7, which is the first of epoch 2

Ranks have nothing in common but the folder. A rank makes its part beside the directory, and brings it into
``ttp_saved_checkpoints-step_7_tmp`` by one rename: what stands there is whole. Whoever finds that the parts are a whole
state takes the ``_tmp`` off, by another rename, which one of them does.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from resilient_train.state.checkpoint.files import sync_folder

Groups = Sequence[Sequence[int]]
"""The ranks, by whose state is the same: one of each group holds all there is to save."""
_NAME = "ttp_saved_checkpoints-step_"
_DAMAGED = "_damaged"


def directory(folder: Path, step: int) -> Path:
    """The complete checkpoint of a step."""
    return folder / f"{_NAME}{step}"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints with their steps, the newest first."""
    found = [(re.fullmatch(rf"{_NAME}(\d+)", path.name), path) for path in folder.glob(f"{_NAME}*")]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def damaged(folder: Path) -> list[Path]:
    """What was complete once, see ``set_aside``."""
    return sorted(folder.glob(f"{_NAME}*{_DAMAGED}_*"))


def set_aside(path: Path) -> None:
    """Gives a damaged checkpoint another name, so that its step can be saved again. Another rank may do the same."""
    for number in itertools.count(1):
        try:
            path.rename(f"{path}{_DAMAGED}_{number}")
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # that of an earlier one
                raise
        else:
            sync_folder(path.parent)
            return


def part(path: Path, rank: int) -> Path | None:
    """The file of a rank in a checkpoint; None where it has none."""
    return next(iter(sorted(path.glob(f"rank_{rank}/*.ckpt"))), None)


def parts(path: Path) -> dict[int, Path]:
    """The files of all ranks that have one."""
    ranks = [int(each.name.removeprefix("rank_")) for each in path.glob("rank_*") if each.name[5:].isdecimal()]
    return {rank: file for rank in sorted(ranks) if (file := part(path, rank)) is not None}


def lacking(path: Path, groups: Groups) -> list[Sequence[int]]:
    """The groups none of whose ranks has a part."""
    present = parts(path)
    return [group for group in groups if not any(rank in present for rank in group)]


def clear(folder: Path, rank: int, world_size: int) -> None:
    """Removes what earlier lives of this rank have left unfinished; rank 0 does so for ranks that are no more."""
    for draft in (path for path in folder.glob(f"{_NAME}*_tmp") if path.is_dir()):
        for each in draft.glob("rank_*"):
            number = each.name.removeprefix("rank_")
            gone = rank == 0 and not (number.isdecimal() and int(number) < world_size)
            if number == str(rank) or gone:
                _remove(each)
        with contextlib.suppress(OSError):  # others have parts in it
            draft.rmdir()
    _remove(_stage(folder, rank))


def make_stage(folder: Path, rank: int) -> Path:
    """An empty directory in which a rank makes its part; see ``deliver``."""
    stage = _stage(folder, rank)
    _remove(stage)
    stage.mkdir(parents=True)
    return stage


def deliver(folder: Path, step: int, rank: int, groups: Groups) -> bool:
    """The part that a rank has made becomes one of the step's; returns whether the step's checkpoint is complete.

    Raises OSError.
    """
    stage, final = _stage(folder, rank), directory(folder, step)
    draft = final.with_name(f"{final.name}_tmp")
    sync_folder(stage)
    while not final.exists():
        draft.mkdir(exist_ok=True)
        try:
            stage.rename(draft / f"rank_{rank}")
        except FileNotFoundError:  # right now another rank has made it complete
            if stage.exists():
                continue
            raise
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # it was delivered before, in this life
                raise
            _remove(stage)
        sync_folder(draft)
        return _publish(draft, final, groups)
    _remove(stage)
    return True


def _publish(draft: Path, final: Path, groups: Groups) -> bool:
    if not final.exists():
        if lacking(draft, groups) and not final.exists():
            return False
        try:
            draft.rename(final)
        except OSError:
            if not final.exists():
                raise
    _remove(draft)  # of a rank that came when it was complete without it
    sync_folder(final.parent)
    return True


def _stage(folder: Path, rank: int) -> Path:
    return folder / f".ttp_rank_{rank}"


def _remove(path: Path) -> None:
    """A file of MindSpore's may be read-only, which a directory does not mind."""
    if path.exists():
        shutil.rmtree(path, onerror=_unless_gone)


def _unless_gone(_: object, path: str, error: tuple[object, BaseException, object]) -> None:
    if os.path.lexists(path):
        raise error[1]
