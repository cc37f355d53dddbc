"""Which checkpoints go, and what dead processes left."""

from __future__ import annotations

import os
from pathlib import Path

from resilient_train.state.checkpoint.files import remove, remove_leftover, storing, sync_folder
from resilient_train.state.checkpoint.manifest import GONE, REPLACED, TMP, parse_name
from resilient_train.state.checkpoint.verify import candidates, verify

_WRONG = "wrong_"


def retain(folder: Path, keep: int, *, newest_step: int | None = None, agreed_step: int = -1) -> list[Path]:
    """Deletes the periodic checkpoints that are older than the newest ``keep`` complete ones; returns them.

    Those of steps after ``newest_step``, the one just written, neither count nor go: the job went back behind them,
    since they could not be taken up.

    The newest one without NaN stays as well, if all of those have some: there is nothing else to go on from. So does
    the newest one of ``agreed_step`` or before: all behind it may yet turn out to be in doubt.

    Complete means here: all files are there with their sizes and headers (reading every byte after each save would cost
    as much as the save). End-of-life checkpoints are never deleted. Raises StorageError.
    """
    assert keep >= 1
    removed: list[Path] = []
    complete, sound, agreed = 0, False, agreed_step < 0
    with storing(folder):
        for name, path in candidates(folder):
            if name.kind != "periodic" or name.suffix or (newest_step is not None and name.step > newest_step):
                continue
            counts = complete < keep or (not agreed and name.step <= agreed_step)
            report = verify(path, digests=False) if counts or not sound else None
            if report is not None and report.ok and (counts or report.without_nan):
                complete, sound = min(complete + 1, keep), sound or report.without_nan
                agreed = agreed or name.step <= agreed_step
            elif complete == keep:
                remove(path)
                removed.append(path)
    return removed


def set_aside(folder: Path, wrong_since: int) -> list[Path]:
    """Checkpoints from behind that step get a name that nobody goes on from (``wrong_step_N``); returns the new ones.

    An older one that was set aside for the same step goes. Raises StorageError.
    """
    moved: list[Path] = []
    with storing(folder):
        for name, path in candidates(folder):
            if name.step <= wrong_since:
                continue
            place = path.with_name(f"{_WRONG}{path.name}")
            if os.path.lexists(place):
                remove(place)
            path.rename(place)
            moved.append(place)
        if moved:
            sync_folder(folder)
    return moved


def tidy(folder: Path) -> list[Path]:
    """Ends what dead processes had begun; returns what was deleted. For the start of a run. Raises StorageError.

    Drafts and half-deleted checkpoints go. One that was moved aside for a newer one of its step comes back if that
    never came into place. A draft whose writer lives, here or on another node, is left alone, and so is every draft on
    a file system without locks.
    """
    removed: list[Path] = []
    with storing(folder):
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            name = parse_name(path.name)
            suffix = name.suffix if name else ""
            if suffix == REPLACED:
                place = path.with_name(path.name.removesuffix(REPLACED))
                if not os.path.lexists(place):
                    path.rename(place)
                    sync_folder(folder)
                    continue
                remove(path)
            elif suffix == GONE:
                remove(path)
            elif suffix != TMP or not remove_leftover(path, assume_dead=False):
                continue
            removed.append(path)
    return removed
